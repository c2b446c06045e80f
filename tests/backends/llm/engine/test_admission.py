"""Deadlines: the fit of step times and the earliest finish, by hand-computed numbers."""

from __future__ import annotations

import pytest

from backends.llm.engine.admission import StepCosts, earliest_finish_s


def observed(pairs):
    times = StepCosts()
    for num_tokens, seconds in pairs:
        times = times.observed(num_tokens, seconds)
    return times


def test_a_line_is_found_exactly():
    times = observed([(1, 0.011), (101, 0.111), (501, 0.511), (11, 0.021)])
    assert times.per_token_s == pytest.approx(0.001)
    assert times.seconds(201) == pytest.approx(0.211)


def test_steps_of_one_size_say_nothing_of_others():
    times = observed([(8, 0.02)] * 5)
    assert times.per_token_s == 0.0 and times.seconds(500) == pytest.approx(0.02)


def test_the_past_fades():
    times = observed([(1, 1.0)] * 50 + [(1, 0.1)] * 500)
    assert times.seconds(1) == pytest.approx(0.1, rel=0.1)


def test_the_earliest_finish_is_prompts_ahead_in_full_steps_then_one_step_a_token():
    times = observed([(1, 0.011), (101, 0.111)] * 20)
    # 250 tokens in steps of 100: two of 0.110 s and one of 0.060 s; then 9 tokens of 0.011 s.
    assert earliest_finish_s(times, 250, 10, 100) == pytest.approx(2 * 0.110 + 0.060 + 9 * 0.011)


def test_nothing_seen_refuses_nobody():
    assert earliest_finish_s(StepCosts(), 10_000, 100, 64) == 0.0
