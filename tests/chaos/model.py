"""What chaos is made around: a tiny language model with few blocks, its answers, and a bystander."""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from backends.llm import LLMEngine, SamplingParams
from backends.llm.engine.load import SETTINGS_FILE
from backends.llm.loaders import load_model
from backends.llm.runners.cpu import numba_lacks
from backends.llm.runners.cpu_options import CpuOptions
from ensembles.text_embedding.chat import weights
from tests.clients.openai_server.conftest import write_tiny_llm
from tests.serving import COMPILE, write_python_model

MODEL, BYSTANDER = "chat", "bystander"
MAX_MODEL_LEN = 512
MAX_TOKENS = 48
# 60 blocks of 32 tokens in float32: some dozen requests fit, so that waiting and preemption are seen.
_CACHE_BYTES = 60 * 32 * 2 * 2 * 2 * 16 * 4


@dataclass(frozen=True)
class Known:
    """A prompt, and what the engine alone answers."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def write_repository(repository: Path) -> None:
    """Writes both models: the language model for a runner whose answers are the same to the token in every batch."""
    folder = repository / MODEL / "1"
    write_tiny_llm(folder)
    if numba_lacks(load_model(folder).config, CpuOptions()):
        engine = {"exact": True, "kv_cache_bytes": _CACHE_BYTES}
    else:
        engine = {"runner": "numba", "num_threads": 2, "kv_cache_bytes": _CACHE_BYTES // 2}
    engine |= {"max_model_len": MAX_MODEL_LEN}
    engine |= {"max_num_seqs": 32, "max_waiting": 200, "max_num_batched_tokens": 256}
    (folder / SETTINGS_FILE).write_text(json.dumps(engine))
    write_python_model(repository, BYSTANDER)


def publish_real_model(repository: Path) -> None:
    """Writes SmolLM2-135M in the place of the tiny model, as a user would."""
    limits = ("--max-model-len", str(MAX_MODEL_LEN), "--kv-cache-memory", "256MiB")
    command = [*COMPILE, "llm", str(weights()), "--name", MODEL, "-r", str(repository), *limits]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    write_python_model(repository, BYSTANDER)


def known_answers(repository: Path, count: int, rng: random.Random) -> list[Known]:
    """Returns prompts of all lengths up to the limit with their greedy answers; each is answered alone."""
    engine = LLMEngine.load(repository / MODEL / "1")
    try:
        return [_known(engine, prompt) for prompt in _prompts(count, rng)]
    finally:
        engine.close()


def _prompts(count: int, rng: random.Random) -> list[tuple[int, ...]]:
    """Every third prompt begins as another does, for the prefix cache; the last is as long as can be."""
    prompts: list[tuple[int, ...]] = []
    for index in range(count):
        shared = rng.choice(prompts)[: rng.randrange(1, 200)] if index % 3 == 2 else ()
        own = tuple(rng.randrange(4, 250) for _ in range(rng.choice((1, 5, 40, 150, 250))))
        prompts.append((*shared, *own))
    return [*prompts[:-1], tuple(rng.randrange(4, 250) for _ in range(MAX_MODEL_LEN - 1))]


def _known(engine: LLMEngine, prompt: Sequence[int]) -> Known:
    params = SamplingParams(max_tokens=min(MAX_TOKENS, MAX_MODEL_LEN - len(prompt)), temperature=0, ignore_eos=True)
    (result,) = engine.generate([list(prompt)], params)
    return Known(tuple(prompt), tuple(result.outputs[0].token_ids))
