"""Prompt lookup against a rescan of the whole text; the work for a step; decoding with it."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.llm.engine.outputs import RequestId
from backends.llm.sampling.ngram import MAX_MATCH, MAX_PLACES, MIN_MATCH, NgramIndex, NgramProposer
from backends.llm.sampling.params import SamplingParams
from backends.llm.sampling.proposer import NO_DRAFT, Draft
from backends.llm.sampling.sampler import Sampled, SampleRequest, sample
from backends.llm.sampling.state import SamplerState

A, B = RequestId("a"), RequestId("b")


def index_of(*token_ids: int) -> NgramIndex:
    index = NgramIndex()
    index.append(token_ids)
    return index


def rescan(tokens: list[int], count: int) -> tuple[int, ...]:
    """The newest of the longest matches of the end, found by looking at every place."""
    found = []
    for place in range(len(tokens) - 1, MIN_MATCH - 1, -1):
        length = 0
        while length < min(MAX_MATCH, place) and tokens[place - 1 - length] == tokens[-1 - length]:
            length += 1
        if length >= MIN_MATCH:
            found.append((length, place))
    if not found:
        return ()
    _, place = max(found[:MAX_PLACES], key=lambda match: (match[0], match[1]))
    repeated = list(tokens)
    for source in range(place, place + count):
        repeated.append(repeated[source])
    return tuple(repeated[len(tokens) :])


def test_what_followed_the_last_tokens_before_is_proposed() -> None:
    assert index_of(1, 2, 3, 4, 5, 6, 7, 9, 1, 2, 3, 4).propose(3) == (5, 6, 7)


def test_the_longest_match_wins_over_a_newer_one() -> None:
    assert index_of(7, 1, 2, 50, 8, 1, 2, 60, 7, 1, 2).propose(1) == (50,)
    assert index_of(1, 2, 50, 1, 2, 60, 1, 2).propose(1) == (60,)


def test_one_equal_token_or_a_new_end_gives_nothing() -> None:
    assert index_of(1, 2, 3, 4, 2).propose(4) == ()
    assert index_of(1).propose(4) == ()
    assert index_of().propose(4) == ()


def test_a_loop_goes_on() -> None:
    assert index_of(5, 1, 2, 3, 1, 2, 3, 1, 2, 3).propose(5) == (1, 2, 3, 1, 2)
    assert index_of(1, 1, 1).propose(2) == (1, 1)


@given(st.lists(st.integers(0, 2), max_size=60), st.integers(0, 20), st.integers(1, 20))
def test_it_is_what_a_rescan_finds(tokens: list[int], first: int, count: int) -> None:
    index = NgramIndex()
    index.append(tokens[:first])
    for token_id in tokens[first:]:
        index.append([token_id])
    assert index.propose(count) == rescan(tokens, count)


def test_the_work_of_a_step_does_not_grow_with_the_text() -> None:
    """The worst text: every place matches."""

    def seconds(length: int) -> float:
        index = NgramIndex()
        index.append([1] * length)
        best = float("inf")
        for _ in range(30):
            begin = time.perf_counter()
            index.propose(8)
            index.append([1])
            best = min(best, time.perf_counter() - begin)
        return best

    assert seconds(200_000) < 8 * seconds(200)


def test_requests_have_indexes_of_their_own() -> None:
    proposer = NgramProposer()
    proposer.add(A, [1, 2, 3, 1, 2])
    proposer.add(B, [1, 2, 4, 1, 2])
    assert proposer.propose({A: 1, B: 1}) == {A: Draft((3,)), B: Draft((4,))}
    assert proposer.propose({A: 0}) == {A: NO_DRAFT}
    proposer.append(A, [4, 5])
    assert proposer.propose({A: 2, B: 2}) == {A: NO_DRAFT, B: Draft((4, 1))}
    proposer.remove(A)
    proposer.remove(A)
    with pytest.raises(KeyError):
        proposer.append(A, [1])


def test_g28_the_first_draft_token_is_verified() -> None:
    proposer = NgramProposer()
    proposer.add(A, [1, 1, 1])
    draft = proposer.propose({A: 1})[A]
    assert draft == Draft((1,))
    logits = np.zeros((2, 3), dtype=np.float32)
    logits[:, 2] = 1.0
    (result,) = sample(logits, [SampleRequest(SamplerState(SamplingParams(), (1, 1, 1), seed=0), draft)])
    assert result == Sampled((2,))


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0.7, seed=3)])
def test_a_model_decoded_with_prompt_lookup_gives_its_plain_answer(params: SamplingParams) -> None:
    """A model whose next logits depend on its last two tokens, as a table of random rows; it soon repeats itself."""
    table = np.random.default_rng(0).normal(size=(6, 6, 6)).astype(np.float32) * 4
    prompt = [0, 1]

    def logits_of(tokens: list[int]) -> np.ndarray:
        row: np.ndarray = table[tokens[-2], tokens[-1]]
        return row

    plain = list(prompt)
    state = SamplerState(params, prompt, seed=3)
    while len(plain) < 120:
        (one,) = sample(logits_of(plain)[None], [SampleRequest(state)])
        assert isinstance(one, Sampled)
        plain += one.token_ids

    proposer = NgramProposer()
    proposer.add(A, prompt)
    tokens, steps = list(prompt), 0
    state = SamplerState(params, prompt, seed=3)
    while len(tokens) < 120:
        draft = proposer.propose({A: 4})[A]
        rows = [logits_of([*tokens, *draft.token_ids[:i]]) for i in range(1 + len(draft.token_ids))]
        (several,) = sample(np.stack(rows), [SampleRequest(state, draft)])
        assert isinstance(several, Sampled)
        proposer.append(A, several.token_ids)
        tokens += several.token_ids
        steps += 1
    assert tokens[:120] == plain[:120]
    assert steps < 80
