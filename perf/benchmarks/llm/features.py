"""What each part of the engine is worth, on a real model in one process: batching, prefix cache, loading.

python -m perf.benchmarks.llm.features MODEL.gguf
"""

from __future__ import annotations

import argparse
import random
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from backends.llm import LLMEngine, SamplingParams
from backends.llm.engine.load import engine_settings
from backends.llm.loaders import load_model
from backends.llm.runners.base import ModelRunner
from backends.llm.tokenizers import load_tokenizer
from backends.llm.tokenizers.base import Tokenizer
from perf.metrics import nearest_rank

THREADS = 2
MAX_NUM_SEQS = 32


@dataclass(frozen=True)
class Served:
    """One open-loop run.

    Attributes:
        tokens_per_s: output tokens over the time from the first arrival to the last token.
        p99_s: of the time from a request's intended arrival to its last token.
    """

    rate: float
    tokens_per_s: float
    p99_s: float


class Model:
    """A loaded model, under several engines one after the other."""

    def __init__(self, path: Path) -> None:
        started = time.perf_counter()
        self.tokenizer: Tokenizer = load_tokenizer(path)
        settings = engine_settings({"num_threads": THREADS, "kv_cache_bytes": 1 << 30})
        self.runner: ModelRunner = settings.open_runner(load_model(path))
        self.engine().generate([[1, 2, 3]], SamplingParams(max_tokens=1))
        self.first_token_s = time.perf_counter() - started

    def engine(self, **scheduler: Any) -> LLMEngine:
        """Returns an engine of its own over the same runner."""
        options = {"max_num_seqs": MAX_NUM_SEQS, "max_num_batched_tokens": 512, **scheduler}
        return LLMEngine(self.runner, self.tokenizer, engine_settings(options).scheduler)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--requests", type=int, default=96, help="of each open-loop run")
    arguments = parser.parse_args()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model = Model(arguments.model)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    size = arguments.model.stat().st_size / 2**20
    print(
        f"load to first token {model.first_token_s:.1f} s; memory grew by {grown:.0f} MB, the file has {size:.0f} MB\n"
    )
    bench_prefix_cache(model)
    bench_batching(model, arguments.requests)
    return 0


def bench_prefix_cache(model: Model) -> None:
    """32 requests that share 512 tokens, at once, with and without the cache."""
    rng = random.Random(1)
    shared = [rng.randrange(1000, 40_000) for _ in range(512)]
    prompts = [[*shared, *(rng.randrange(1000, 40_000) for _ in range(16))] for _ in range(32)]
    ttft, computed = {}, {}
    for cached in (False, True):
        engine = model.engine(enable_prefix_cache=cached)
        engine.generate([shared], SamplingParams(max_tokens=1))  # somebody asked with this prefix before
        steps = engine.stats().num_computed_tokens
        ttft[cached] = statistics.mean(_first_token_s(engine, prompts))
        computed[cached] = engine.stats().num_computed_tokens - steps
    print("| 32 requests with a shared prefix of 512 tokens | without | with the cache | |\n|---|---|---|---|")
    saved = 1 - computed[True] / computed[False]
    print(f"| prompt tokens computed | {computed[False]} | {computed[True]} | {saved:.1%} less |")
    print(f"| mean TTFT | {ttft[False]:.2f} s | {ttft[True]:.2f} s | **{ttft[False] / ttft[True]:.1f}x** |\n")


def bench_batching(model: Model, num_requests: int) -> None:
    """Continuous against static batching, Poisson arrivals at several rates, 8-256 tokens in and out."""
    capacity = _closed_loop_rate(model)
    runs: dict[str, list[Served]] = {"continuous": [], "static": []}
    for share in (0.25, 0.4, 0.55, 0.7, 0.85):
        for batching, found in runs.items():
            found.append(_open_loop(model.engine(batching=batching), capacity * share, num_requests))
    print("| requests/s | continuous tokens/s | p99 s | static tokens/s | p99 s |\n|---|---|---|---|---|")
    for ours, theirs in zip(runs["continuous"], runs["static"], strict=True):
        cells = f"{ours.tokens_per_s:.0f} | {ours.p99_s:.2f} | {theirs.tokens_per_s:.0f} | {theirs.p99_s:.2f}"
        print(f"| {ours.rate:.2f} | {cells} |")
    for theirs in runs["static"]:
        within = [ours for ours in runs["continuous"] if ours.p99_s <= theirs.p99_s]
        if within:
            best = max(within, key=lambda ours: ours.tokens_per_s)
            print(
                f"\nat a p99 of {theirs.p99_s:.2f} s static gives {theirs.tokens_per_s:.0f} tokens/s, continuous gives "
                f"{best.tokens_per_s:.0f} at {best.p99_s:.2f} s: **{best.tokens_per_s / theirs.tokens_per_s:.2f}x**"
            )


def _requests(count: int) -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(5)
    return [
        (
            [rng.randrange(1000, 40_000) for _ in range(rng.randint(8, 256))],
            SamplingParams(max_tokens=rng.randint(8, 256), ignore_eos=True),
        )
        for _ in range(count)
    ]


def _closed_loop_rate(model: Model) -> float:
    """Returns the requests per second that the model does when all wait at once."""
    requests = _requests(48)
    engine = model.engine()
    started = time.perf_counter()
    engine.generate([prompt for prompt, _ in requests], [params for _, params in requests], progress=False)
    return len(requests) / (time.perf_counter() - started)


def _open_loop(engine: LLMEngine, rate: float, count: int) -> Served:
    rng = random.Random(11)
    arrivals = []
    at = 0.0
    for _ in range(count):
        at += rng.expovariate(rate)
        arrivals.append(at)
    waiting = list(zip(arrivals, _requests(count), strict=True))
    started = time.perf_counter()
    latencies, tokens = [], 0
    while waiting or engine.has_requests:
        now = time.perf_counter() - started
        while waiting and waiting[0][0] <= now:
            arrival, (prompt, params) = waiting.pop(0)
            engine.add_request(str(arrival), prompt, params)
        if not engine.has_requests:
            time.sleep(max(0.0, waiting[0][0] - now))
            continue
        for output in engine.step():
            tokens += len(output.delta.token_ids)
            if output.is_last:
                latencies.append(time.perf_counter() - started - float(output.request_id))
    return Served(rate, tokens / (time.perf_counter() - started), nearest_rank(np.sort(latencies), 99))


def _first_token_s(engine: LLMEngine, prompts: Sequence[Sequence[int]]) -> list[float]:
    started = time.perf_counter()
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, SamplingParams(max_tokens=1))
    seconds = []
    while engine.has_requests:
        outputs = engine.step()
        seconds += [time.perf_counter() - started for output in outputs if output.delta.token_ids]
    return seconds


if __name__ == "__main__":
    sys.exit(main())
