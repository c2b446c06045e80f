"""What structured output costs: answers kept to a language against free ones, in turn, and the time of their masks.

    python -m perf.benchmarks.llm.structured model.gguf

One engine; every answer has as many tokens, whether it is complete then or not. The first turn does not count.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

from backends.llm import LLMEngine, SamplingParams

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "city": {"enum": ["Berlin", "London", "Paris", "Rome"]},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "age", "city", "tags"],
    "additionalProperties": False,
}
KINDS: dict[str, dict[str, Any] | None] = {
    "free": None,
    "JSON schema": {"json": {"type": "array", "items": PERSON, "minItems": 50}},
    "any JSON": {"json": {"type": "array", "minItems": 200}},
    "regular expression": {"regex": r"([A-Z][a-z]{2,12} is \d{1,3} years old\. ){30}"},
}
SAMPLING: dict[str, dict[str, Any]] = {"greedy": {}, "temperature 0.7, top-p 0.9": {"temperature": 0.7, "top_p": 0.9}}
PROMPT = "Make up some people and describe each of them as JSON with name, age, city and tags."
MAX_TOKENS = 64


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    engine = LLMEngine.load(arguments.model, max_num_seqs=max(arguments.streams))
    prompt = engine.tokenizer.chat([{"role": "user", "content": PROMPT}])
    columns = [
        "streams",
        "sampling",
        "answers",
        "tokens/s",
        "to free",
        "of the rounds",
        "masks, of the time",
        "us a token",
    ]
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for streams in arguments.streams:
        for sampling, fields in SAMPLING.items():
            rounds = [
                {name: _run(engine, prompt, streams, value, fields) for name, value in KINDS.items()}
                for _ in range(arguments.rounds + 1)
            ][1:]
            for name in KINDS:
                speed = statistics.median(turn[name][0] for turn in rounds)
                ratios = sorted(turn[name][0] / turn["free"][0] for turn in rounds)
                mask = statistics.median(turn[name][1] for turn in rounds)  # seconds a token
                print(
                    f"| {streams} | {sampling} | {name} | {speed:.0f} | {statistics.median(ratios):.2f}x | "
                    f"{ratios[0]:.2f}-{ratios[-1]:.2f} | {mask * speed:.1%} | {1e6 * mask:.0f} |",
                    flush=True,
                )
    engine.close()
    return 0


def _run(
    engine: LLMEngine, prompt: list[int], streams: int, value: dict[str, Any] | None, fields: dict[str, Any]
) -> tuple[float, float]:
    """Returns tokens per second of all streams, and the seconds of masks for each of their tokens."""
    params = [
        SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, structured_outputs=value, seed=i, **fields)  # type: ignore[arg-type]
        for i in range(streams)
    ]
    masked = engine.stats().mask_seconds
    began = time.perf_counter()
    results = engine.generate([prompt] * streams, params, progress=False)
    seconds = time.perf_counter() - began
    tokens = sum(len(result.outputs[0].token_ids) for result in results)
    return tokens / seconds, (engine.stats().mask_seconds - masked) / tokens


if __name__ == "__main__":
    raise SystemExit(main())
