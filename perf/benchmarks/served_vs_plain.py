"""Served throughput: the ensemble on Triton against a plain HTTP server, one load generator, in turn."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from compiler.addresses import ServerOptions
from compiler.server import TritonServer
from perf.errors import PerfError
from perf.load_generator import Target, run_closed
from perf.metrics import nearest_rank, throughput_rps
from perf.records import Records
from perf.session import Question, open_session
from perf.workload import Workload

CONCURRENCY = 16
SECONDS = 6.0
ROUNDS = 3


def bench_served(specs: Path, repository: Path, threads: int) -> None:
    """Prints requests per second and latencies of all, and the ratio to the better plain server, round by round.

    The plain server runs with one thread and with all: which is better depends on what the client takes.
    """
    options = ServerOptions(repository, http_port=0, grpc_port=0, metrics_port=0)
    with ExitStack() as stack:
        server = stack.enter_context(TritonServer(options))
        target = Target(server.addresses.http, "http")
        question = Question("text_embedding", target, input_data=str(specs / "sentences.json"))
        targets = {"triton": target}
        for count in dict.fromkeys((1, threads)):
            targets[f"plain, {count} thr"] = Target(stack.enter_context(plain_server(specs, count)), "http")
        session = stack.enter_context(open_session(question))
        rounds = []
        for number in range(ROUNDS):
            # The order changes each round: no one always runs on the machine that another has warmed.
            order = list(targets)[:: -1 if number % 2 else 1]
            rounds.append({name: figures(_load(targets[name], session.workload)) for name in order})
    print(f"Served at concurrency {CONCURRENCY}, HTTP, {session.workload.description}")
    print(
        f"{'':>14} {'requests/s':>11} {'p50 ms':>8} {'p99 ms':>8} {'errors':>7}   (medians of {ROUNDS} x {SECONDS:g} s)"
    )
    for name in targets:
        rate, p50, p99, errors = (statistics.median(column) for column in zip(*(r[name] for r in rounds), strict=True))
        print(f"{name:>14} {rate:>11.1f} {p50:>8.1f} {p99:>8.1f} {errors:>7.0f}")
    ratios = [r["triton"][0] / max(r[name][0] for name in r if name != "triton") for r in rounds]
    spread = f"{min(ratios):.2f}-{max(ratios):.2f}"
    print(f"{'ratio':>14} {statistics.median(ratios):>10.2f}x   (to the better plain server; rounds {spread})\n")
    if any(result[3] for r in rounds for result in r.values()):
        raise PerfError("requests failed: the ratio above does not count")


def _load(target: Target, workload: Workload) -> Records:
    return run_closed(target, workload, CONCURRENCY, warmup_requests=2 * CONCURRENCY, duration_s=SECONDS)


def figures(records: Records) -> tuple[float, float, float, int]:
    """Returns requests per second, p50 and p99 in milliseconds, and the number of errors."""
    ordered = np.sort(records.latency_ms)
    rate = throughput_rps(records.completed, records.duration_s)
    return rate, nearest_rank(ordered, 50), nearest_rank(ordered, 99), records.failed


@contextmanager
def plain_server(specs: Path, threads: int) -> Iterator[str]:
    """Runs the plain server in a process of its own and yields its address."""
    command = [sys.executable, "-m", "perf.benchmarks.plain_server", str(specs), str(threads)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            yield f"127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.stdin.close()
