"""How much worse a form of the model predicts a text: perplexity against the exact form, on the project's documents.

python -m perf.benchmarks.llm.perplexity MODEL.gguf
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from backends.llm import LLMEngine, SamplingParams

ROOT = Path(__file__).parents[3]
TEXTS = ("README.md", "docs/design.md", "docs/llm.md")
CHUNK_TOKENS = 256
FORMS: dict[str, dict[str, Any]] = {
    "exact, float32": {"exact": True},
    "u8_rows (the default)": {},
    "u8_rows, OpenVINO": {"runner": "openvino"},
    "u8_rows, KV cache u8": {"kv_cache_precision": "u8"},
    "u8": {"weights": "u8"},
    "u4": {"weights": "u4"},
    "as stored": {"weights": "stored"},
    "bf16": {"weights": "bf16"},
}


def perplexity(engine: LLMEngine, chunks: Sequence[Sequence[int]]) -> float:
    """Returns exp(mean negative log probability) of all tokens but each chunk's first."""
    results = engine.generate(chunks, SamplingParams(max_tokens=1, prompt_logprobs=0, ignore_eos=True))
    logprobs = [token.logprob for result in results for token in result.prompt_logprobs or ()]
    return math.exp(-sum(logprobs) / len(logprobs))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--chunks", type=int, default=24)
    arguments = parser.parse_args()
    text = "\n".join((ROOT / name).read_text(encoding="utf-8") for name in TEXTS)
    exact = None
    print("| form | perplexity | change |\n|---|---|---|")
    for name, options in FORMS.items():
        engine = LLMEngine.load(arguments.model, num_threads=2, enable_prefix_cache=False, **options)
        ids = engine.tokenizer.encode(text)[: arguments.chunks * CHUNK_TOKENS]
        chunks = [ids[first : first + CHUNK_TOKENS] for first in range(0, len(ids), CHUNK_TOKENS)]
        found = perplexity(engine, [chunk for chunk in chunks if len(chunk) > 1])
        engine.close()
        exact = exact or found
        print(f"| {name} | {found:.3f} | {found / exact - 1:+.2%} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
