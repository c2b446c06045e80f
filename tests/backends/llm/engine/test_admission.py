"""Deadlines: the fit of step times and the earliest finish, by hand-computed numbers."""

from __future__ import annotations

import pytest

from backends.llm.engine.admission import earliest_finish_s
from backends.llm.sampling.step_times import StepTimes


def observed(pairs):
    times = StepTimes()
    for num_tokens, seconds in pairs:
        times.observe(num_tokens, seconds, has_prompts=num_tokens > 20)
    return times


def test_a_line_is_found_exactly():
    times = observed([(1, 0.011), (101, 0.111), (501, 0.511), (11, 0.021)] * 3)
    assert times.seconds(201) == pytest.approx(0.211)
    assert times.fit().of(201) == pytest.approx(0.211)  # of the decodes alone


def test_steps_of_one_size_say_nothing_of_others():
    times = observed([(8, 0.02)] * 5)
    assert times.seconds(500) == pytest.approx(0.02) and times.fit() is None
    assert times.seconds(2) == pytest.approx(0.005)  # or more: nobody is refused for what is not known


def test_a_few_steps_are_no_measure():
    assert observed([(8, 0.02)] * 2).seconds(8) == 0.0


def test_the_past_fades_and_slow_steps_hardly_count():
    assert observed([(1, 1.0)] * 50 + [(1, 0.1)] * 3).seconds(1) == pytest.approx(0.1)
    assert observed([(1, 0.1)] * 50 + [(1, 1.0)]).seconds(1) == pytest.approx(0.145)


def test_the_earliest_finish_is_prompts_ahead_in_full_steps_then_one_step_a_token():
    times = observed([(1, 0.011), (101, 0.111)] * 20)
    # 250 tokens in steps of 100: two of 0.110 s and one of 0.060 s; then 9 tokens of 0.011 s.
    assert earliest_finish_s(times, 250, 10, 100) == pytest.approx(2 * 0.110 + 0.060 + 9 * 0.011)


def test_nothing_seen_refuses_nobody():
    assert earliest_finish_s(StepTimes(), 10_000, 100, 64) == 0.0
