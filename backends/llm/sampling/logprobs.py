"""Log probabilities of tokens: of the model's own logits, before bias, penalties and so on (vLLM's `raw_logprobs`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from backends.llm.errors import LogitsError
from backends.llm.sampling.distribution import largest


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One token's natural log probability, and those of the best tokens at its place.

    Attributes:
        rank: 1 for the most likely token; equal ones are ordered by id, as in `top`.
        top: (token id, log probability), best first.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


def token_logprobs(logits: npt.NDArray[np.float32], token_id: int, num_top: int) -> TokenLogprobs:
    """Returns the log probability of a token and of the `num_top` best.

    Args:
        logits: [vocab_size]; -inf is a token that cannot be.
        token_id: the chosen token.
        num_top: 0 for the chosen one alone.

    Raises:
        LogitsError: a logit is NaN or infinity.
    """
    value = logits[token_id]
    top = logits.max()
    if not np.isfinite(top):
        raise LogitsError(f"the largest logit is {top}; every logit must be a number, and one of them finite")
    weights = logits - top
    np.exp(weights, out=weights)
    log_total = math.log(float(weights.sum(dtype=np.float64)))
    rank = 1 + int(np.count_nonzero(logits > value)) + int(np.count_nonzero(logits[:token_id] == value))
    best = largest(logits, num_top).tolist() if num_top else []
    alternatives = tuple((index, float(logits[index] - top) - log_total) for index in best)
    return TokenLogprobs(token_id, float(value - top) - log_total, rank, alternatives)


def prompt_logprobs(
    logits: npt.NDArray[np.float32], token_ids: Sequence[int], num_top: int
) -> tuple[TokenLogprobs, ...]:
    """Returns the log probabilities of prompt tokens; the prompt's first token has none, and no row.

    Args:
        logits: [num_tokens, vocab_size], row i computed at the token *before* `token_ids[i]`; a chunk's rows or all.
        token_ids: the prompt's tokens after the first, or the part that the rows belong to.
        num_top: alternatives for each.
    """
    assert len(logits) == len(token_ids), "one row of logits for each token"
    return tuple(token_logprobs(row, token_id, num_top) for row, token_id in zip(logits, token_ids, strict=True))
