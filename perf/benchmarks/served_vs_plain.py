"""Served throughput: the ensemble on Triton against a plain HTTP server, one load generator, in turn."""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from compiler.addresses import ServerOptions
from compiler.server import TritonServer
from perf.errors import PerfError
from perf.load_generator import Target, run_closed
from perf.metrics import nearest_rank, throughput_rps
from perf.records import Records
from perf.session import Question, open_session

CONCURRENCY = 16
SECONDS = 6.0
ROUNDS = 3


def bench_served(specs: Path, repository: Path, threads: int) -> None:
    """Prints requests per second and latencies of both, and the ratio of each round."""
    options = ServerOptions(repository, http_port=0, grpc_port=0, metrics_port=0)
    with TritonServer(options) as server, plain_server(specs, threads) as plain:
        question = Question(
            "text_embedding", Target(server.addresses.http, "http"), input_data=str(specs / "sentences.json")
        )
        with open_session(question) as session:
            rounds = []
            for number in range(ROUNDS):
                # The order changes each round: neither always runs on the machine that the other has warmed.
                targets = [("triton", session.target), ("plain", Target(plain, "http"))]
                if number % 2:
                    targets.reverse()
                rounds.append(
                    {
                        name: run_closed(
                            target, session.workload, CONCURRENCY, warmup_requests=2 * CONCURRENCY, duration_s=SECONDS
                        )
                        for name, target in targets
                    }
                )
    print(f"Served at concurrency {CONCURRENCY}, HTTP, {session.workload.description}")
    print(
        f"{'':>10} {'requests/s':>11} {'p50 ms':>8} {'p99 ms':>8} {'errors':>7}   (medians of {ROUNDS} x {SECONDS:g} s)"
    )
    for name in ("plain", "triton"):
        runs = [figures(r[name]) for r in rounds]
        rate, p50, p99, errors = (statistics.median(column) for column in zip(*runs, strict=True))
        print(f"{name:>10} {rate:>11.1f} {p50:>8.1f} {p99:>8.1f} {errors:>7.0f}")
    ratios = [figures(r["triton"])[0] / figures(r["plain"])[0] for r in rounds]
    spread = f"{min(ratios):.2f}-{max(ratios):.2f}"
    print(f"{'ratio':>10} {statistics.median(ratios):>10.2f}x   (rounds {spread})\n")
    if any(figures(r[name])[3] for r in rounds for name in r):
        raise PerfError("requests failed: the ratio above does not count")


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
