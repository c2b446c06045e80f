"""Rows of logits, and the tokens that sample() makes of them; for the tests of the sampler."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from backends.llm.errors import LogitsError
from backends.llm.sampling.params import SamplingParams
from backends.llm.sampling.sampler import Sampled, SampleRequest, sample
from backends.llm.sampling.state import SamplerState

Floats = npt.NDArray[np.float32]


def rows(seed: int, count: int, vocab_size: int, scale: float = 3.0) -> Floats:
    return (scale * np.random.default_rng(seed).normal(size=(count, vocab_size))).astype(np.float32)


def started(params: SamplingParams, prompt: Sequence[int] = (1, 2, 3), **kwargs: object) -> SamplerState:
    return SamplerState(params, prompt, seed=params.seed or 0, **kwargs)  # type: ignore[arg-type]


def tokens(results: Sequence[Sampled | LogitsError]) -> list[tuple[int, ...]]:
    assert all(isinstance(result, Sampled) for result in results)
    return [result.token_ids for result in results if isinstance(result, Sampled)]


def decode(logits: Floats, params: SamplingParams, prompt: Sequence[int] = (1, 2, 3), **kwargs: object) -> list[int]:
    """Plain decoding: one row at a time."""
    state = started(params, prompt, **kwargs)
    return [tokens(sample(row[None], [SampleRequest(state)]))[0][0] for row in logits]


def packed(allowed: npt.NDArray[np.bool_]) -> npt.NDArray[np.int32]:
    """[rows, vocab_size] bool to the words of a grammar's mask, bit by bit."""
    words = np.zeros((len(allowed), -(-allowed.shape[1] // 32)), dtype=np.uint32)
    for row, token_id in zip(*np.nonzero(allowed), strict=True):
        words[row, token_id // 32] |= np.uint32(1 << (token_id % 32))
    return words.view(np.int32)
