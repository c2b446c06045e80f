"""The torch runner on a GPU: SmolLM2's greedy tokens as on the CPU, and its speed with and without CUDA graphs.

python tests/gpu/llm.py MODEL.gguf
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from backends.llm import LLMEngine, SamplingParams
from backends.llm.runners.flashinfer_attention import is_installed

PROMPTS = [list(range(100 + 7 * i, 132 + 7 * i)) for i in range(32)]
PARAMS = SamplingParams(max_tokens=64, temperature=0, ignore_eos=True)


def tokens(model: Path, prompts: list[list[int]], **options: object) -> list[tuple[int, ...]]:
    engine = LLMEngine.load(model, runner="torch", **options)
    try:
        return [tuple(result.outputs[0].token_ids) for result in engine.generate(prompts, PARAMS)]
    finally:
        engine.close()


def speeds(model: Path, **options: object) -> str:
    """Returns tokens/s at 1, 8 and 32 streams, the best of three after one that does not count."""
    engine, found = LLMEngine.load(model, runner="torch", device="cuda", dtype="bfloat16", **options), []
    for streams in (1, 8, 32):
        taken = []
        for _ in range(4):
            started = time.perf_counter()
            engine.generate(PROMPTS[:streams], PARAMS)
            taken.append(time.perf_counter() - started)
        found.append(streams * 64 / min(taken[1:]))
    engine.close()
    return " / ".join(f"{speed:.0f}" for speed in found)


def main() -> int:
    model = Path(sys.argv[1])
    wanted = tokens(model, PROMPTS[:4])
    for graphs in (False, True):
        got = tokens(model, PROMPTS[:4], device="cuda", attention="kernel", cuda_graphs=graphs)
        equal = sum(a == b for ours, theirs in zip(got, wanted, strict=True) for a, b in zip(ours, theirs, strict=True))
        print(f"float32 on the GPU, graphs {graphs}: {equal} of {64 * len(wanted)} tokens are the CPU's")
        if got != wanted:
            return 1
    for attention in ("plain", "kernel", *(["flashinfer"] if is_installed() else [])):
        for graphs in (False, True) if attention != "plain" else (False,):
            print(f"tokens/s at 1 / 8 / 32 streams, {attention}, graphs {graphs}: ", end="", flush=True)
            print(speeds(model, attention=attention, cuda_graphs=graphs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
