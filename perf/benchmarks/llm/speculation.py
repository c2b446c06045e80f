"""Prompt lookup against plain decoding at one stream: answers that repeat their prompt and one that does not.

    python -m perf.benchmarks.llm.speculation model.gguf

Both engines run in turn in one process; the first turn does not count. The answers must be the same to the token.
"""

from __future__ import annotations

import argparse
import statistics
import time
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
    arguments = parser.parse_args()
    engines = {count: LLMEngine.load(arguments.model, num_draft_tokens=count) for count in (0, MAX_DRAFTS)}
    print("| answer | tokens | steps | plain tok/s | with drafts | ratio | of the rounds |\n" + "|---" * 7 + "|")
    for name, text in PROMPTS.items():
        prompt = engines[0].tokenizer.chat([{"role": "user", "content": text}])
        turns = range(arguments.rounds + 1)
        rounds = [{count: _run(engine, prompt) for count, engine in engines.items()} for _ in turns]
        answers = {result[0] for turn in rounds for result in turn.values()}
        if len(answers) > 1:
            print(f"the answers to '{name}' differ")
            return 1
        tokens = len(rounds[0][0][0])
        ratios = sorted(turn[0][2] / turn[MAX_DRAFTS][2] for turn in rounds[1:])
        speeds = [tokens / statistics.median(turn[count][2] for turn in rounds[1:]) for count in engines]
        print(
            f"| {name} | {tokens} | {rounds[1][MAX_DRAFTS][1]} | {speeds[0]:.1f} | {speeds[1]:.1f} | "
            f"{statistics.median(ratios):.2f}x | {ratios[0]:.2f}-{ratios[-1]:.2f} |",
            flush=True,
        )
    for engine in engines.values():
        engine.close()
    return 0


def _run(engine: LLMEngine, prompt: list[int]) -> tuple[tuple[int, ...], int, float]:
    """Returns the answer's tokens, the steps that it took, and the seconds."""
    steps = engine.stats().num_steps
    began = time.perf_counter()
    (result,) = engine.generate([prompt], SamplingParams(max_tokens=MAX_TOKENS), progress=False)
    seconds = time.perf_counter() - began
    return result.outputs[0].token_ids, engine.stats().num_steps - steps, seconds


if __name__ == "__main__":
    raise SystemExit(main())
