"""Continuous against static batching at equal p99: how many more requests a second one may send.

python -m perf.benchmarks.llm.batching MODEL.gguf

Step times are measured on the model, for decodes and prompt tokens in all mixtures; the real scheduler then plans
hundreds of Poisson arrivals on a simulated clock, which takes seconds where serving them takes an hour. Two real runs,
one of each kind, show how far the simulation is off.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import numpy.typing as npt

from backends.llm.engine.config import SchedulerConfig
from backends.llm.engine.kv_cache_manager import KVCacheManager
from backends.llm.engine.load import engine_settings
from backends.llm.engine.outputs import BlockId, RequestId, ScheduledRequest, SchedulerOutput
from backends.llm.engine.request import Request
from backends.llm.engine.scheduler import Scheduler
from backends.llm.loaders import load_model
from backends.llm.runners.base import ModelRunner
from perf.metrics import nearest_rank

MAX_NUM_SEQS, STEP_TOKENS, LENGTHS = 32, 512, (8, 256)
DECODES, PROMPT_TOKENS, CONTEXT = (0, 1, 2, 4, 8, 16, 32), (0, 16, 64, 160, 320, 512), 192
SHARES = (0.1, 0.2, 0.3, 0.5, 0.9)  # of what static batching can do at most
FLOOR = 2.5
Execute = Callable[[SchedulerOutput], float]


@dataclass(frozen=True)
class Work:
    """Requests by their intended arrival in seconds: when, prompt, tokens wanted."""

    arrivals: tuple[float, ...]
    prompts: tuple[tuple[int, ...], ...]
    outputs: tuple[int, ...]

    @classmethod
    def poisson(cls, rate: float, count: int) -> Work:
        """Returns `count` requests of 8 to 256 tokens in and out; another rate changes the arrivals' scale alone."""
        rng = random.Random(5)
        gaps = [rng.expovariate(1.0) for _ in range(count)]
        prompts = [tuple(rng.randrange(1000, 40_000) for _ in range(rng.randint(*LENGTHS))) for _ in range(count)]
        outputs = tuple(rng.randint(*LENGTHS) for _ in range(count))
        return cls(tuple((np.cumsum(gaps) / rate).tolist()), tuple(prompts), outputs)


@dataclass(frozen=True)
class Served:
    """One open-loop run.

    Attributes:
        rate: requests a second that arrived.
        tokens_per_s: output tokens over the time from the first arrival to the last token.
        p99_s, mean_s: from a request's intended arrival to its last token.
    """

    rate: float
    tokens_per_s: float
    p99_s: float
    mean_s: float


class StepTimes:
    """Seconds of a step by its decodes and its prompt tokens, between what was measured in straight lines."""

    def __init__(self, table: npt.NDArray[np.float64]) -> None:
        self._table = table  # [len(DECODES), len(PROMPT_TOKENS)]

    @classmethod
    def measured(cls, runner: ModelRunner, rounds: int = 4) -> StepTimes:
        """Takes the fastest of some rounds, so that what else the machine does counts little."""
        table = np.full((len(DECODES), len(PROMPT_TOKENS)), np.inf)
        for number, (d, p) in product(range(rounds + 1), product(range(len(DECODES)), range(len(PROMPT_TOKENS)))):
            step = mixture(DECODES[d], PROMPT_TOKENS[p], runner.block_size)
            if step.requests:
                started = time.perf_counter()
                runner.execute(step)
                if number:  # the first of each shape makes its kernels
                    table[d, p] = min(table[d, p], time.perf_counter() - started)
        table[0, 0] = 0.0
        return cls(table)

    def __call__(self, output: SchedulerOutput) -> float:
        decodes = sum(len(r.token_ids) == 1 for r in output.requests)
        along = [np.interp(output.num_tokens - decodes, PROMPT_TOKENS, row) for row in self._table]
        return float(np.interp(decodes, DECODES, along))


def mixture(decodes: int, prompt_tokens: int, block_size: int) -> SchedulerOutput:
    """Returns a step of requests that decode and one that computes a part of its prompt, over blocks of their own."""
    blocks = -(-max(CONTEXT + 1, STEP_TOKENS) // block_size)
    requests = [_scheduled(i, 1, CONTEXT, blocks) for i in range(decodes)]
    if prompt_tokens:
        requests.append(_scheduled(decodes, prompt_tokens, 0, blocks))
    return SchedulerOutput(tuple(requests))


def _scheduled(index: int, tokens: int, computed: int, blocks: int) -> ScheduledRequest:
    table = [BlockId(index * blocks + i) for i in range(blocks)]
    return ScheduledRequest(RequestId(str(index)), list(range(1000, 1000 + tokens)), computed, table, 1)


def serve(work: Work, batching: str, execute: Execute, num_blocks: int, block_size: int) -> Served:
    """Runs the scheduler over the arrivals; `execute` says how many seconds a step took."""
    config = SchedulerConfig(max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=STEP_TOKENS, batching=batching)
    scheduler = Scheduler(config, KVCacheManager(num_blocks, block_size))
    now, added, latencies = 0.0, 0, []
    count = len(work.arrivals)
    while added < count or scheduler.has_requests:
        if not scheduler.has_requests:
            now = max(now, work.arrivals[added])
        while added < count and work.arrivals[added] <= now:
            scheduler.add_request(Request(RequestId(str(added)), work.prompts[added], work.outputs[added]))
            added += 1
        output = scheduler.schedule()
        now += execute(output)
        updates = scheduler.update_from_output(output, {r.request_id: (7,) for r in output.requests if r.num_logits})
        latencies += [now - work.arrivals[int(u.request.request_id)] for u in updates if u.request.finish_reason]
    rate = count / work.arrivals[-1]
    p99 = nearest_rank(np.sort(latencies), 99)
    return Served(rate, sum(work.outputs) / (now - work.arrivals[0]), p99, statistics.mean(latencies))


def at_equal_p99(simulate: Callable[[str, float], Served], theirs: Served) -> Served:
    """Returns the fastest continuous run whose p99 is no later than that of a static run."""
    low, high = theirs.rate, 8 * theirs.rate
    best = simulate("continuous", low)
    for _ in range(9):
        middle = (low + high) / 2
        found = simulate("continuous", middle)
        if found.p99_s <= theirs.p99_s:
            low, best = middle, found
        else:
            high = middle
    return best


def compare(simulate: Callable[[str, float], Served]) -> list[tuple[Served, Served]]:
    """Returns static runs at several rates, each with its equal."""
    most = simulate("static", 1e3).tokens_per_s / statistics.mean(LENGTHS)
    statics = [simulate("static", most * share) for share in SHARES]
    return [(theirs, at_equal_p99(simulate, theirs)) for theirs in statics]


def _real(runner: ModelRunner) -> Execute:
    def execute(output: SchedulerOutput) -> float:
        started = time.perf_counter()
        if output.requests:
            runner.execute(output).logits.argmax(axis=1)
        return time.perf_counter() - started

    return execute


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--requests", type=int, default=500, help="of each simulated run")
    parser.add_argument("--real-requests", type=int, default=40, help="of each real run; 0 leaves them out")
    arguments = parser.parse_args()
    settings = engine_settings({"num_threads": arguments.threads, "kv_cache_bytes": 1 << 30})
    runner = settings.open_runner(load_model(arguments.model))
    times = StepTimes.measured(runner)
    sizes = runner.num_blocks, runner.block_size

    def simulate(batching: str, rate: float) -> Served:
        return serve(Work.poisson(rate, arguments.requests), batching, times, *sizes)

    pairs = compare(simulate)
    print("| p99 s | static requests/s | tokens/s | continuous requests/s | tokens/s | ratio |\n" + "|---" * 6 + "|")
    for static, ours in pairs:
        ratio = f"**{ours.tokens_per_s / static.tokens_per_s:.2f}x**"
        cells = (static.p99_s, static.rate, static.tokens_per_s, ours.rate, ours.tokens_per_s)
        print("| " + " | ".join(f"{cell:.2f}" for cell in cells) + f" | {ratio} |")
    if arguments.real_requests:
        _check(pairs[SHARES.index(0.3)], times, _real(runner), sizes, arguments.real_requests)
    runner.close()
    held = [static.p99_s for static, ours in pairs if ours.tokens_per_s >= FLOOR * static.tokens_per_s]
    print(f"\n{FLOOR}x or more " + (f"up to a p99 of {max(held):.1f} s" if held else "at none of these"))
    return 0 if held else 1


def _check(pair: Sequence[Served], times: Execute, real: Execute, sizes: tuple[int, int], count: int) -> None:
    print(f"\n{count} requests, simulated and real:")
    for batching, served in zip(("static", "continuous"), pair, strict=True):
        work = Work.poisson(served.rate, count)
        wanted, found = (serve(work, batching, execute, *sizes) for execute in (times, real))
        print(
            f"  {batching} at {served.rate:.2f} requests/s: {wanted.tokens_per_s:.0f} and {found.tokens_per_s:.0f} "
            f"tokens/s, slowest answer {wanted.p99_s:.1f} and {found.p99_s:.1f} s"
        )


if __name__ == "__main__":
    sys.exit(main())
