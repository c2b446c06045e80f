"""Accept or resample: 100,000 draws have the target's frequencies; wrong rules are shown to have others."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.llm.sampling.acceptance import verify_certain, verify_drawn
from backends.llm.sampling.distribution import Distribution, draw
from backends.llm.sampling.params import SamplingParams
from backends.llm.sampling.proposer import Draft
from backends.llm.sampling.randomness import Purpose, uniform
from backends.llm.sampling.sampler import Sampled, SampleRequest, sample
from backends.llm.sampling.state import SamplerState

P = np.array([0.5, 0.3, 0.2], dtype=np.float32)
Q = np.array([0.2, 0.3, 0.5], dtype=np.float32)
DRAWS = 100_000
SIGMAS = 4 * 0.5 / DRAWS**0.5  # four standard deviations of a frequency, at most; the numbers are fixed

Rule = Callable[[Distribution, int, float, float], tuple[int, bool]]


def over(weights: np.ndarray) -> Distribution:
    return Distribution(np.arange(len(weights)), weights)


def frequencies(rule: Rule) -> tuple[list[float], float]:
    """Returns how often each token comes out, and how often the draft was accepted."""
    counts, accepted = np.zeros(3), 0
    target, drafts = over(P), over(Q)
    for i in range(DRAWS):
        draft = draw(drafts, uniform(i, 0, 0, Purpose.DRAFT))
        token_id, kept = rule(target, draft, uniform(i, 0, 0, Purpose.ACCEPT), uniform(i, 0, 0, Purpose.RESAMPLE))
        counts[token_id] += 1
        accepted += kept
    return (counts / DRAWS).tolist(), accepted / DRAWS


def test_g27_marginals_are_the_targets_and_70_percent_are_accepted() -> None:
    marginal, rate = frequencies(lambda p, draft, u, v: verify_drawn(p, draft, Q, u, v))
    assert marginal == pytest.approx(P.tolist(), abs=SIGMAS)
    assert rate == pytest.approx(0.7, abs=SIGMAS)


def test_g27_drawing_again_from_the_target_is_the_known_bias_and_would_be_seen() -> None:
    def wrong(target: Distribution, draft: int, accept: float, resample: float) -> tuple[int, bool]:
        if accept * Q[draft] < P[draft]:
            return draft, True
        return draw(target, resample), False

    marginal, _ = frequencies(wrong)
    assert marginal == pytest.approx([0.35, 0.39, 0.26], abs=SIGMAS)
    assert marginal != pytest.approx(P.tolist(), abs=10 * SIGMAS)


def test_g27_a_looked_up_draft_is_accepted_with_its_probability_and_leaves_the_target() -> None:
    counts, accepted = np.zeros(3), 0
    for i in range(DRAWS):
        token_id, kept = verify_certain(over(P), 1, uniform(i, 0, 0, Purpose.TOKEN))
        counts[token_id] += 1
        accepted += kept
    assert (counts / DRAWS).tolist() == pytest.approx(P.tolist(), abs=SIGMAS)
    assert accepted / DRAWS == pytest.approx(0.3, abs=SIGMAS)
    # Of those that were not accepted, the residual max(p - q, 0): 0.5 to 0.2.
    assert counts[0] / (counts[0] + counts[2]) == pytest.approx(0.5 / 0.7, abs=2 * SIGMAS)


def test_g27_the_sampler_judges_drawn_drafts_by_the_same_rule() -> None:
    """Two tokens are in a residual, so that numbers which are not independent would show; each draft has its own q."""
    p = np.array([0.4, 0.4, 0.2], dtype=np.float32)
    q = np.array([[0.1, 0.1, 0.8], [0.8, 0.1, 0.1]], dtype=np.float32)
    logits = np.log(np.stack([p, p, p]))
    count = 20_000
    drawn = np.zeros((3, 3))  # [place, token]
    for seed in range(count):
        drafts = tuple(draw(over(q[i]), uniform(seed, 0, 1 + i, Purpose.DRAFT)) for i in range(2))
        state = SamplerState(SamplingParams(temperature=1.0), (9,), seed=seed)
        (result,) = sample(logits, [SampleRequest(state, Draft(drafts, q))])
        assert isinstance(result, Sampled)
        for place, token_id in enumerate(result.token_ids):
            drawn[place, token_id] += 1
    wide = SIGMAS * (DRAWS / count) ** 0.5
    assert drawn[1].sum() / count == pytest.approx(0.4, abs=wide)  # sum of min(p, q) in the first place
    assert drawn[2].sum() / drawn[1].sum() == pytest.approx(0.6, abs=wide / 0.4**0.5)
    for place in drawn:
        assert (place / place.sum()).tolist() == pytest.approx(p.tolist(), abs=wide / 0.24**0.5)


def test_greedy_ignores_the_probabilities_of_a_draft() -> None:
    logits = np.log(np.stack([P, P]))
    state = SamplerState(SamplingParams(), (9,), seed=0)
    (result,) = sample(logits, [SampleRequest(state, Draft((0,), Q[None]))])
    assert result == Sampled((0, 0))


WEIGHTS = st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0, 2.0]), min_size=4, max_size=4).filter(any)


@given(WEIGHTS, WEIGHTS)
@settings(max_examples=60)
def test_the_marginal_is_exact_for_any_p_and_q(p_weights: list[float], q_weights: list[float]) -> None:
    """Not drawn: the chance to be accepted is found by bisection, the residual by going through its numbers evenly."""
    p = np.array(p_weights, dtype=np.float32) / np.float32(sum(p_weights))
    q = np.array(q_weights, dtype=np.float32) / np.float32(sum(q_weights))
    kept = np.flatnonzero(p)
    target = Distribution(kept, p[kept])
    marginal = np.zeros(4)
    for draft in np.flatnonzero(q).tolist():
        low, high = 0.0, 1.0
        for _ in range(30):
            middle = (low + high) / 2
            low, high = (middle, high) if verify_drawn(target, draft, q, middle, 0.0)[1] else (low, middle)
        marginal[draft] += q[draft] * low
        if low < 0.999999:
            rest = [verify_drawn(target, draft, q, 0.9999999, (i + 0.5) / 200)[0] for i in range(200)]
            marginal += q[draft] * (1 - low) * np.bincount(rest, minlength=4) / 200
    assert marginal == pytest.approx(p, abs=0.01)


def test_equal_p_and_q_accept_everything() -> None:
    for i in range(1000):
        draft = draw(over(P), uniform(i, 0, 0, Purpose.DRAFT))
        assert verify_drawn(over(P), draft, P / P.sum(), uniform(i, 0, 0, Purpose.ACCEPT), 0.5) == (draft, True)


def test_a_draft_that_the_target_cannot_give_is_never_accepted() -> None:
    target = Distribution(np.array([0, 2]), np.array([1.0, 1.0], dtype=np.float32))
    assert verify_drawn(target, 1, Q, 0.0, 0.0) == (0, False)
    # max(p - q, 0) is [0.3, 0, 0]: token 2 has all it needs from accepted drafts.
    assert verify_drawn(target, 1, Q, 0.0, 0.999) == (0, False)
