"""sample() with drafts to verify, and with the masks of grammars."""

from __future__ import annotations

import numpy as np
import pytest

from backends.llm.sampling.params import SamplingParams
from backends.llm.sampling.proposer import Draft
from backends.llm.sampling.sampler import Sampled, SampleRequest, sample
from tests.backends.llm.sampling.steps import decode, packed, rows, started, tokens


def test_g28_the_first_draft_token_is_verified() -> None:
    logits = np.zeros((2, 4), dtype=np.float32)
    logits[:, 2] = 1.0
    request = SampleRequest(started(SamplingParams(), (1, 1, 1)), Draft((1,)))
    (result,) = sample(logits, [request])
    assert result == Sampled((2,))


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=0.9, top_p=0.9, seed=4)])
def test_with_looked_up_drafts_the_tokens_are_those_of_plain_decoding(params: SamplingParams) -> None:
    """Greedy and sampled alike, whatever the drafts say, with penalties that depend on every token before."""
    params = SamplingParams(**{**params.__dict__, "frequency_penalty": 0.8, "repetition_penalty": 1.2})
    rng = np.random.default_rng(0)
    table = rows(1, 64, 50, scale=2.0)  # the logits at each position
    expected = decode(table, params)
    state = started(params)
    answer: list[int] = []
    accepted = 0
    while len(answer) < 60:
        num_drafts = int(rng.integers(0, 4))
        at = len(answer)
        guesses = [t if rng.random() < 0.6 else int(rng.integers(50)) for t in expected[at : at + num_drafts]]
        block = table[at : at + 1 + len(guesses)]
        (result,) = sample(block, [SampleRequest(state, Draft(tuple(guesses)))])
        assert isinstance(result, Sampled)
        accepted += result.num_accepted
        answer += result.token_ids
    assert answer == expected[: len(answer)]
    assert accepted > 20
    assert state.num_output_tokens == len(answer)


def test_rows_of_drafts_and_of_others_lie_side_by_side() -> None:
    table = rows(2, 7, 30)
    best = table.argmax(axis=1).tolist()
    results = sample(
        table,
        [
            SampleRequest(started(SamplingParams()), Draft((best[0], best[1], 0 if best[2] else 1))),
            SampleRequest(started(SamplingParams())),
            SampleRequest(started(SamplingParams()), Draft((best[5],))),
        ],
    )
    assert tokens(results) == [tuple(best[:3]), (best[4],), (best[5], best[6])]
    assert [r.num_accepted for r in results if isinstance(r, Sampled)] == [2, 0, 1]


def test_min_tokens_counts_the_drafts_before() -> None:
    logits = np.zeros((3, 10), dtype=np.float32)
    logits[:, 7] = 9.0
    logits[:, 3] = 1.0
    state = started(SamplingParams(min_tokens=2), stop_token_ids=(7,))
    (result,) = sample(logits, [SampleRequest(state, Draft((3, 3)))])
    assert result == Sampled((3, 3, 7))


def test_a_mask_allows_exactly_its_tokens() -> None:
    logits = rows(0, 2, 70)
    allowed = np.zeros((2, 70), dtype=bool)
    allowed[0, [33, 69]] = True
    allowed[1, 31] = True
    best = 33 if logits[0, 33] > logits[0, 69] else 69
    (result,) = sample(logits, [SampleRequest(started(SamplingParams()), Draft((best,)), packed(allowed))])
    assert result == Sampled((best, 31))


def test_a_draft_that_the_mask_forbids_is_not_accepted() -> None:
    logits = np.zeros((2, 70), dtype=np.float32)
    logits[:, 5] = 9.0
    allowed = np.ones((2, 70), dtype=bool)
    allowed[0, 5] = False
    for params in (SamplingParams(), SamplingParams(temperature=1.0, seed=1)):
        (result,) = sample(logits, [SampleRequest(started(params), Draft((5,)), packed(allowed))])
        assert isinstance(result, Sampled) and result.token_ids[0] != 5


def test_a_mask_of_fewer_tokens_than_logits_forbids_the_padding() -> None:
    logits = np.zeros((1, 100), dtype=np.float32)
    logits[0, 99] = 9.0
    mask = packed(np.ones((1, 64), dtype=bool))
    assert tokens(sample(logits, [SampleRequest(started(SamplingParams()), allowed_tokens=mask)])) == [(0,)]
