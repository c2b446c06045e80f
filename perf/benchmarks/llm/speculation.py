"""Prompt lookup against plain decoding at one stream: answers that repeat their prompt and one that does not.

    python -m perf.benchmarks.llm.speculation model.gguf

Both engines run in turn in one process; the first turn does not count. With --exact (float32) the answers must be the
same to the token; in lower precisions rounding depends on how many tokens a step has, drafts or not.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from backends.llm import LLMEngine, SamplingParams

TEXT = (
    "The lighthouse keeper climbed the narrow stairs every evening at dusk. He carried a small lamp, a tin of oil and "
    "a book that he had read many times. From the top he could see the harbour, the fishing boats and the long line of "
    "hills behind the town. When the fog came in, he rang the bell every two minutes until morning. Nobody in the town "
    "ever thanked him, but nobody ever complained either, and that was enough for him."
)
CODE = '''def area(width, height):
    """Returns the area of a rectangle."""
    return width * height


def perimeter(width, height):
    """Returns the perimeter of a rectangle."""
    return 2 * (width + height)
'''
PROMPTS = {
    "spelling": f"Correct the spelling of the following text and give the whole text back:\n\n{TEXT}",
    "code": f"Repeat the following code exactly, without changes:\n\n```python\n{CODE}```",
    "summary": f"Summarize in two sentences:\n\n{TEXT}",
    "explanation": "Explain how photosynthesis works in simple terms.",
}
MAX_TOKENS, MAX_DRAFTS = 128, 8


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--exact", action="store_true")
    arguments = parser.parse_args()
    engines = {
        count: LLMEngine.load(arguments.model, num_draft_tokens=count, exact=arguments.exact)
        for count in (0, MAX_DRAFTS)
    }
    print("| answer | tokens | steps | plain tok/s | with drafts | ratio | of the rounds | same |\n" + "|---" * 8 + "|")
    all_same = True
    for name, text in PROMPTS.items():
        prompt = engines[0].tokenizer.chat([{"role": "user", "content": text}])
        turns = range(arguments.rounds + 1)
        rounds = [{count: _run(engine, prompt) for count, engine in engines.items()} for _ in turns][1:]
        is_same = len({run.token_ids for turn in rounds for run in turn.values()}) == 1
        all_same = all_same and is_same
        ratios = sorted(turn[MAX_DRAFTS].tokens_per_s / turn[0].tokens_per_s for turn in rounds)
        plain, drafted = (statistics.median(turn[count].tokens_per_s for turn in rounds) for count in engines)
        last = rounds[-1][MAX_DRAFTS]
        print(
            f"| {name} | {len(last.token_ids)} | {last.steps} | {plain:.1f} | {drafted:.1f} | "
            f"{statistics.median(ratios):.2f}x | {ratios[0]:.2f}-{ratios[-1]:.2f} | {'yes' if is_same else 'no'} |",
            flush=True,
        )
    for engine in engines.values():
        engine.close()
    return 1 if arguments.exact and not all_same else 0


@dataclass(frozen=True)
class Run:
    """One answer: its tokens, the steps that it took, and the seconds."""

    token_ids: tuple[int, ...]
    steps: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return len(self.token_ids) / self.seconds


def _run(engine: LLMEngine, prompt: list[int]) -> Run:
    steps = engine.stats().num_steps
    began = time.perf_counter()
    (result,) = engine.generate([prompt], SamplingParams(max_tokens=MAX_TOKENS), progress=False)
    seconds = time.perf_counter() - began
    return Run(result.outputs[0].token_ids, engine.stats().num_steps - steps, seconds)


if __name__ == "__main__":
    raise SystemExit(main())
