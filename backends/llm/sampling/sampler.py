"""sample(): the logits of one step in, tokens out, each request by its own parameters and untouched by the others.

    logits -> grammar's mask -> ban of stop tokens -> logit bias -> penalties -> greedy: the largest
                                                                              -> temperature, min-p, top-k, top-p, draw

One argmax over the whole block serves all greedy rows and finds every NaN; rows with more to do are looked at again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from backends.llm.errors import LogitsError
from backends.llm.sampling.acceptance import verify_certain, verify_drawn
from backends.llm.sampling.distribution import Distribution, Ids, draw, token_distribution
from backends.llm.sampling.logprobs import TokenLogprobs, token_logprobs
from backends.llm.sampling.proposer import NO_DRAFT, Draft
from backends.llm.sampling.randomness import Purpose
from backends.llm.sampling.state import SamplerState

Floats = npt.NDArray[np.float32]


class SampleRequest(NamedTuple):
    """One answer that gets its next token in this step, or several where drafts are accepted.

    Attributes:
        draft: the draft tokens that the step computed; the answer has 1 + len(draft.token_ids) rows of logits.
        allowed_tokens: [1 + drafts, ceil(vocab_size / 32)] int32, bit i % 32 of word i // 32 set where token i is
            allowed (the bit mask of llguidance and xgrammar); None allows all.
    """

    state: SamplerState
    draft: Draft = NO_DRAFT
    allowed_tokens: npt.NDArray[np.int32] | None = None

    @property
    def num_rows(self) -> int:
        return 1 + len(self.draft.token_ids)


class Sampled(NamedTuple):
    """The next tokens of one answer: the accepted drafts and one token more. It may go on behind a stop token.

    Attributes:
        token_ids: not empty.
        logprobs: one for each token where `params.logprobs` asks for them, else None.
        is_complete: the grammar ends with the last of them.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None = None
    is_complete: bool = False

    @property
    def num_accepted(self) -> int:
        """How many draft tokens were accepted."""
        return len(self.token_ids) - 1


def sample(logits: Floats, requests: Sequence[SampleRequest]) -> list[Sampled | LogitsError]:
    """Chooses the next tokens of every request and notes them in its state.

    Args:
        logits: [sum of num_rows, vocab_size] float32, not written; -inf is a token that cannot be.
        requests: in the order of the rows.

    Returns:
        For each request its tokens, or the error that ends it.
    """
    assert logits.ndim == 2 and len(logits) == sum(r.num_rows for r in requests), "rows of logits fit the requests"
    best = logits.argmax(axis=1)
    # argmax gives the place of the first NaN where there is one, so looking at the winners is enough.
    finite = np.isfinite(logits[np.arange(len(best)), best]).tolist()
    winners = best.tolist()
    results: list[Sampled | LogitsError] = []
    first = 0
    for request in requests:
        rows = slice(first, first + request.num_rows)
        first += request.num_rows
        try:
            results.append(_sample_one(logits[rows], winners[rows], finite[rows], request))
        except LogitsError as error:
            results.append(error)
    return results


def _sample_one(logits: Floats, winners: list[int], finite: list[bool], request: SampleRequest) -> Sampled:
    """Goes through the rows of one request as plain decoding would, as long as the drafts are what it chooses."""
    state = request.state
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    for row, winner in enumerate(winners):
        if not finite[row]:
            raise LogitsError(
                f"the model's largest logit is {logits[row, winner]}, at token {winner}; it must be finite"
            )
        token_id, accepted = _choose(logits[row], winner, request, row)
        state.append(token_id)
        token_ids.append(token_id)
        if state.params.logprobs is not None:
            logprobs.append(token_logprobs(logits[row], token_id, state.params.logprobs))
        if not accepted or state.is_complete:
            break
    kept = tuple(logprobs) if state.params.logprobs is not None else None
    return Sampled(tuple(token_ids), kept, state.is_complete)


def _choose(logits: Floats, winner: int, request: SampleRequest, row: int) -> tuple[int, bool]:
    """Returns the token of one row, and whether it is the draft's."""
    state = request.state
    drafts = request.draft
    draft_token_id = drafts.token_ids[row] if row < len(drafts.token_ids) else None
    token_ids: Ids | None = None  # what the places of `logits` stand for, where they are fewer than the vocabulary
    if state.adjusts or not _is_unmasked(request, row, winner):
        logits, token_ids = _adjusted(logits, request, row)
        place = int(logits.argmax()) if len(logits) else 0
        if not len(logits) or not np.isfinite(logits[place]):
            raise LogitsError(
                f"no token is left to choose from; min_tokens {state.params.min_tokens} still bans those that end the "
                "answer, and a grammar may allow no others"
            )
        winner = place if token_ids is None else int(token_ids[place])
    if state.params.greedy:
        return winner, winner == draft_token_id
    target = token_distribution(logits, state.params)
    if token_ids is not None:
        target = Distribution(token_ids[target.token_ids], target.weights)
    if draft_token_id is None:
        return draw(target, state.uniform(Purpose.TOKEN)), False
    if drafts.probabilities is None:
        return verify_certain(target, draft_token_id, state.uniform(Purpose.TOKEN))
    accept, resample = state.uniform(Purpose.ACCEPT), state.uniform(Purpose.RESAMPLE)
    return verify_drawn(target, draft_token_id, drafts.probabilities[row], accept, resample)


def _is_unmasked(request: SampleRequest, row: int, winner: int) -> bool:
    """A grammar's mask need not be applied: there is none, or the most likely token is wanted and it is allowed."""
    mask = request.allowed_tokens
    if mask is None:
        return True
    word = winner // 32  # a mask may be narrower than the logits, whose padding is not allowed then
    return request.state.params.greedy and word < mask.shape[1] and bool(mask[row, word] >> winner % 32 & 1)


def _adjusted(logits: Floats, request: SampleRequest, row: int) -> tuple[Floats, Ids | None]:
    """Returns a copy with what the parameters change, and only what a grammar allows.

    Returns:
        The logits; and the ascending tokens that they are of, or None where they are of all. A grammar often allows
        few tokens, and all that follows is in proportion to them.
    """
    if request.state.adjusts:
        logits = logits.copy()
        request.state.adjust(logits)
    if request.allowed_tokens is None:
        return logits, None
    words = np.ascontiguousarray(request.allowed_tokens[row]).view(np.uint8)
    allowed = np.unpackbits(words, count=len(logits), bitorder="little").view(bool)
    if np.count_nonzero(allowed) > len(logits) // 8:  # picking many costs more than it saves
        return np.where(allowed, logits, np.float32(-np.inf)), None
    token_ids = np.flatnonzero(allowed)
    return logits[token_ids], token_ids
