"""The work of the LLM benchmarks, the same for all peers: token ids, made from a seed."""

from __future__ import annotations

import random
from typing import Any

NUM_NEW_TOKENS = 64
Round = dict[str, Any]


def streams(count: int, prompt_tokens: int = 32) -> Round:
    """Returns `count` requests at once, each with as many new tokens."""
    rng = random.Random(count)
    requests = [{"token_ids": _tokens(rng, prompt_tokens), "max_tokens": NUM_NEW_TOKENS} for _ in range(count)]
    return {"requests": requests, "max_num_seqs": 32}


def mixed(count: int = 48) -> Round:
    """Returns requests of all lengths: 16-256 tokens in, 8-128 out."""
    rng = random.Random(7)
    requests = [
        {"token_ids": _tokens(rng, rng.randint(16, 256)), "max_tokens": rng.randint(8, 128)} for _ in range(count)
    ]
    return {"requests": requests, "max_num_seqs": 32}


def prefill(prompt_tokens: int = 512) -> Round:
    """Returns one long prompt with one new token."""
    return {"requests": [{"token_ids": _tokens(random.Random(9), prompt_tokens), "max_tokens": 1}], "max_num_seqs": 32}


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(1000, 40_000) for _ in range(count)]
