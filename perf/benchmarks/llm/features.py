"""What parts of the engine are worth, on a real model in one process: prefix cache, loading, the same bits every time.

python -m perf.benchmarks.llm.features MODEL.gguf
"""

from __future__ import annotations

import argparse
import random
import resource
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from backends.llm import LLMEngine, SamplingParams
from backends.llm.engine.load import engine_settings
from backends.llm.engine.outputs import SchedulerOutput
from backends.llm.loaders import load_model
from backends.llm.runners.base import ModelRunner
from backends.llm.tokenizers import load_tokenizer
from backends.llm.tokenizers.base import Tokenizer
from perf.benchmarks.llm.batching import mixture

THREADS = 2
MAX_NUM_SEQS = 32


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
    arguments = parser.parse_args()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    model = Model(arguments.model)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    size = arguments.model.stat().st_size / 2**20
    print(
        f"load to first token {model.first_token_s:.1f} s; memory grew by {grown:.0f} MB, the file has {size:.0f} MB\n"
    )
    bench_prefix_cache(model)
    bench_same_bits(model.runner, arguments.model)
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


def bench_same_bits(plain: ModelRunner, path: Path) -> None:
    """What `batch_invariant` costs, step by step, in turn."""
    settings = engine_settings({"num_threads": THREADS, "kv_cache_bytes": 1 << 30, "batch_invariant": True})
    runners = {"plain": plain, "batch-invariant": settings.open_runner(load_model(path))}
    print("| step | plain ms | batch-invariant ms | |\n|---|---|---|---|")
    for name, (decodes, prompt_tokens) in {"1 decode": (1, 0), "8 decodes": (8, 0), "32 decodes": (32, 0)}.items():
        _same_bits_row(name, runners, mixture(decodes, prompt_tokens, plain.block_size))
    _same_bits_row("a prompt of 512 tokens", runners, mixture(0, 512, plain.block_size))


def _same_bits_row(name: str, runners: Mapping[str, ModelRunner], step: SchedulerOutput) -> None:
    seconds: dict[str, list[float]] = {kind: [] for kind in runners}
    for number in range(12):
        for kind, runner in runners.items():
            started = time.perf_counter()
            runner.execute(step)
            if number:
                seconds[kind].append(time.perf_counter() - started)
    plain, same = (statistics.median(times) * 1e3 for times in seconds.values())
    print(f"| {name} | {plain:.1f} | {same:.1f} | **{same / plain:.2f}x** |", flush=True)


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
