"""How many drafts: against all possible plans, and against a simulated model that takes or refuses them."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.llm.engine.outputs import RequestId
from backends.llm.sampling.speculation import AcceptanceRate, SpeculationController, plan_drafts
from backends.llm.sampling.step_times import StepTime, StepTimes

RATES = st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.8, 0.95, 1.0])


def tokens_per_s(rates: list[float], plan: tuple[int, ...], time: StepTime, draft_token_s: float) -> float:
    """A step with these drafts, added up term by term."""
    tokens = sum(1 + sum(rate**j for j in range(1, count + 1)) for rate, count in zip(rates, plan, strict=True))
    return tokens / (time.of(len(rates) + sum(plan)) + draft_token_s * sum(plan))


@given(
    st.lists(RATES, min_size=1, max_size=3),
    st.sampled_from([0.0, 0.1, 1.0, 7.1]),
    st.sampled_from([0.001, 0.35, 2.0]),
    st.sampled_from([0.0, 0.2]),
)
def test_no_other_plan_gives_more_tokens_per_second(
    rates: list[float], fixed: float, per_token: float, draft_token_s: float
) -> None:
    time = StepTime(fixed, per_token)
    plan = plan_drafts(rates, [4] * len(rates), time, draft_token_s=draft_token_s)
    best = max(tokens_per_s(rates, p, time, draft_token_s) for p in itertools.product(range(5), repeat=len(rates)))
    assert tokens_per_s(rates, tuple(plan), time, draft_token_s) == pytest.approx(best, rel=1e-9)


def test_one_stream_on_a_cpu_takes_many_drafts_and_a_full_batch_takes_fewer() -> None:
    time = StepTime(7.05e-3, 0.35e-3)  # one token 7.4 ms, two 7.75, four 8.45
    assert plan_drafts([0.7], [8], time) == [6]
    assert plan_drafts([0.7], [3], time) == [3]
    assert plan_drafts([0.1], [8], time) == [1]
    assert plan_drafts([0.7] * 32, [8] * 32, time) == [1] * 32
    assert plan_drafts([0.2] * 32, [8] * 32, time) == [0] * 32
    assert plan_drafts([0.9, *[0.1] * 31], [8] * 32, time)[1:] == [0] * 31
    assert plan_drafts([], [], time) == []


def test_a_slow_proposer_is_not_asked() -> None:
    time = StepTime(7e-3, 0.3e-3)
    assert plan_drafts([0.5], [4], time) != [0]
    assert plan_drafts([0.5], [4], time, draft_token_s=7e-3) == [0]


def test_the_line_through_the_step_times() -> None:
    times = StepTimes()
    for num_tokens in [1, 2, 4, 8] * 3:
        times.observe(num_tokens, 7e-3 + 0.4e-3 * num_tokens)
    fit = times.fit()
    assert fit is not None
    assert fit.fixed_s == pytest.approx(7e-3)
    assert fit.per_token_s == pytest.approx(0.4e-3)


def test_one_size_is_no_line_and_a_second_is_remembered_for_a_while() -> None:
    times = StepTimes()
    assert times.fit() is None
    for _ in range(50):
        times.observe(8, 10e-3)
    assert times.fit() is None
    for _ in range(3):
        assert times.fit() is None
        times.observe(40, 26e-3)
    for _ in range(299):
        fit = times.fit()
        assert fit is not None and fit.per_token_s == pytest.approx(0.5e-3)
        times.observe(8, 10e-3)
    times.observe(8, 10e-3)
    assert times.fit() is None


def test_steps_that_were_held_up_do_not_count_as_the_price_of_tokens() -> None:
    times = StepTimes()
    for number in range(60):
        times.observe(1, 7.4e-3)
        times.observe(9, 50e-3 if number % 4 == 0 else 10.6e-3)
    fit = times.fit()
    assert fit is not None and fit.per_token_s < 1.5 * 0.4e-3


def test_a_line_never_falls_and_never_starts_below_zero() -> None:
    falling, steep = StepTimes(), StepTimes()
    for num_tokens in (1, 2, 4) * 3:
        falling.observe(num_tokens, 1.0 / num_tokens)
        steep.observe(num_tokens, num_tokens**2)
    fits = (falling.fit(), steep.fit())
    assert fits[0] is not None and fits[0].per_token_s == 0.0
    assert fits[1] is not None and fits[1].fixed_s == 0.0


def test_the_newest_step_times_count_most() -> None:
    times = StepTimes()
    for scale in (5.0, 1.0):
        for num_tokens in (1, 8) * 100:
            times.observe(num_tokens, scale * (7e-3 + 0.4e-3 * num_tokens))
    fit = times.fit()
    assert fit is not None and fit.per_token_s == pytest.approx(0.4e-3, rel=0.05)


def test_drafts_behind_the_first_rejected_one_do_not_count() -> None:
    rate = AcceptanceRate()
    for _ in range(500):
        rate.record(8, 1)  # one accepted, one rejected, six unknown
    assert rate.rate == pytest.approx(0.5, abs=0.01)


def test_the_reported_rate_is_of_all_draft_tokens() -> None:
    times = StepTimes()
    controller = SpeculationController(4, times)
    assert controller.acceptance_rate is None
    controller.record(RequestId("a"), 4, 3)
    controller.record(RequestId("b"), 4, 0)
    controller.record(RequestId("b"), 0, 0)
    assert (controller.num_drafts, controller.num_accepted, controller.acceptance_rate) == (8, 3, 0.375)
    assert controller.num_proposals == 2


def simulate(
    true_rate: float,
    num_requests: int,
    *,
    steps: int = 600,
    controlled: bool = True,
    held_up: float = 0.0,
    seed: int = 1,
) -> float:
    """Returns tokens per second of a simulated server relative to plain decoding, by what its steps take undisturbed.

    Args:
        held_up: share of the steps that are measured as five times as long, since other work got in their way.
    """
    time = StepTime(7e-3, 0.4e-3)
    rng = random.Random(seed)
    times = StepTimes()
    controller = SpeculationController(8, times)
    requests = [RequestId(str(i)) for i in range(num_requests)]
    tokens, seconds = 0, 0.0
    for _ in range(600):
        plan = controller.plan(requests) if controlled else dict.fromkeys(requests, 8)
        for request_id, count in plan.items():
            accepted = 0
            while accepted < count and rng.random() < true_rate:
                accepted += 1
            controller.record(request_id, count, accepted)
            tokens += 1 + accepted
        num_tokens = num_requests + sum(plan.values())
        seconds += time.of(num_tokens)
        measured = time.of(num_tokens) * rng.uniform(0.9, 1.1) * (5 if rng.random() < held_up else 1)
        times.observe(num_tokens, measured)
    return tokens / seconds / (num_requests / time.of(num_requests))


@pytest.mark.parametrize("num_requests", [1, 8, 32])
def test_drafts_that_are_never_accepted_cost_little_and_without_control_a_lot(num_requests: int) -> None:
    assert simulate(0.0, num_requests) > 0.95
    assert simulate(0.0, num_requests, controlled=False) < 0.75


def test_drafts_that_are_accepted_pay() -> None:
    assert simulate(0.9, 1) > 3.0
    assert simulate(0.9, 32) > 1.1


def test_the_first_step_of_a_size_may_be_slow() -> None:
    """Runtimes prepare for a shape when they first see it."""
    rng = random.Random(3)
    times = StepTimes()
    controller = SpeculationController(8, times)
    seen: set[int] = set()
    tokens, seconds = 0, 0.0
    for _ in range(100):
        count = controller.plan([RequestId("a")])[RequestId("a")]
        accepted = 0
        while accepted < count and rng.random() < 0.9:
            accepted += 1
        controller.record(RequestId("a"), count, accepted)
        took = 7e-3 + 0.4e-3 * (1 + count)
        times.observe(1 + count, took * (1 if count in seen else 20))
        seen.add(count)
        tokens, seconds = tokens + 1 + accepted, seconds + took
    assert tokens / seconds > 2.5 / 7.4e-3


@pytest.mark.parametrize("num_requests", [1, 8, 32])
def test_a_busy_machine_neither_stops_what_pays_nor_starts_what_does_not(num_requests: int) -> None:
    """Three of ten steps are measured as five times as long."""
    none = [simulate(0.0, num_requests, held_up=0.3, seed=seed) for seed in range(8)]
    assert min(none) > 0.8 and sum(none) / 8 > 0.94
    most = [simulate(0.9, num_requests, held_up=0.3, seed=seed) for seed in range(8)]
    assert min(most) > {1: 2.5, 8: 1.4, 32: 1.0}[num_requests]


def test_a_request_that_got_no_drafts_is_tried_again_and_recovers() -> None:
    times = StepTimes()
    controller = SpeculationController(4, times)
    request_id = RequestId("a")
    for num_tokens in (32, 64) * 20:
        times.observe(num_tokens, 7e-3 + 0.4e-3 * num_tokens)
    others = [RequestId(str(i)) for i in range(31)]
    for other in (*others, request_id):
        for _ in range(20):
            controller.record(other, 1, 0)
    waited = 0
    while controller.plan([request_id, *others])[request_id] == 0:
        controller.record(request_id, 0, 0)
        waited += 1
        assert waited < 1000
    assert waited > 100
    counts = []
    for _ in range(12):
        counts.append(controller.plan([request_id, *others])[request_id])
        controller.record(request_id, counts[-1], counts[-1])
    assert counts[:3] == [1, 2, 3]
    assert counts[-1] == 4


def test_a_request_is_forgotten() -> None:
    times = StepTimes()
    controller = SpeculationController(4, times)
    controller.record(RequestId("a"), 4, 4)
    controller.remove(RequestId("a"))
    controller.remove(RequestId("a"))
    assert controller.plan([RequestId("a")]) == {RequestId("a"): 0}
    assert controller.plan([RequestId("a")]) == {RequestId("a"): 1}
