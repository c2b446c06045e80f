"""What structured output costs: answers kept to a language against free ones, in turn, and the time of their masks.

    python -m perf.benchmarks.llm.structured model.gguf

One engine; every answer has as many tokens, whether it is complete then or not. The first turn does not count. Beside
the tokens per second stand processor times, which other jobs on the machine hardly change: of the process to that of
the free answers, and of the engine's thread in one step outside of the model ("own").
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends.llm import LLMEngine, SamplingParams
from backends.llm.engine.outputs import ModelRunnerOutput, SchedulerOutput

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
    model = engine._runner.execute = TimedModel(engine._runner.execute)  # type: ignore[method-assign]
    prompt = engine.tokenizer.chat([{"role": "user", "content": PROMPT}])
    columns = [
        "streams",
        "sampling",
        "answers",
        "tokens/s",
        "to free",
        "of the rounds",
        "processor time",
        "masks",
        "own",
    ]
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for streams in arguments.streams:
        for sampling, fields in SAMPLING.items():
            rounds = [
                {name: _run(engine, model, prompt, streams, value, fields) for name, value in KINDS.items()}
                for _ in range(arguments.rounds + 1)
            ][1:]
            for name in KINDS:
                runs = [turn[name] for turn in rounds]
                ratios = sorted(turn[name].tokens_per_s / turn["free"].tokens_per_s for turn in rounds)
                print(
                    f"| {streams} | {sampling} | {name} | {statistics.median(r.tokens_per_s for r in runs):.0f} | "
                    f"{statistics.median(ratios):.2f}x | {ratios[0]:.2f}-{ratios[-1]:.2f} | "
                    f"{statistics.median(turn[name].cpu_s / turn['free'].cpu_s for turn in rounds):.2f}x | "
                    f"{statistics.median(r.mask_share for r in runs):.1%} of the time | "
                    f"{1e3 * statistics.median(r.own_s for r in runs):.2f} ms a step |",
                    flush=True,
                )
    engine.close()
    return 0


@dataclass(frozen=True)
class Run:
    """One turn.

    Attributes:
        tokens_per_s: of all streams.
        mask_share: of the time, that went into masks.
        cpu_s: processor time of the whole process.
        own_s: of the engine's thread, in one step without the model's.
    """

    tokens_per_s: float
    mask_share: float
    cpu_s: float
    own_s: float


class TimedModel:
    """Takes the place of a runner's `execute`, and counts its processor time."""

    def __init__(self, execute: Callable[[SchedulerOutput], ModelRunnerOutput]) -> None:
        self._execute = execute
        self.seconds = 0.0

    def __call__(self, output: SchedulerOutput) -> ModelRunnerOutput:
        began = time.thread_time()
        found = self._execute(output)
        self.seconds += time.thread_time() - began
        return found


def _run(
    engine: LLMEngine,
    model: TimedModel,
    prompt: list[int],
    streams: int,
    value: dict[str, Any] | None,
    fields: dict[str, Any],
) -> Run:
    params = [
        SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, structured_outputs=value, seed=i, **fields)  # type: ignore[arg-type]
        for i in range(streams)
    ]
    before = engine.stats()
    began, cpu_began, model.seconds = time.perf_counter(), time.thread_time(), 0.0
    all_cpu_began = time.process_time()
    results = engine.generate([prompt] * streams, params, progress=False)
    all_cpu = time.process_time() - all_cpu_began
    seconds, cpu = time.perf_counter() - began, time.thread_time() - cpu_began - model.seconds
    stats = engine.stats()
    tokens = sum(len(result.outputs[0].token_ids) for result in results)
    masked = stats.mask_seconds - before.mask_seconds
    return Run(tokens / seconds, masked / seconds, all_cpu, cpu / (stats.num_steps - before.num_steps))


if __name__ == "__main__":
    raise SystemExit(main())
