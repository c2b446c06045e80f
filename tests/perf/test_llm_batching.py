"""The comparison of batching policies: the simulated clock by hand, and the search for an equal p99."""

from __future__ import annotations

import numpy as np
import pytest

from perf.benchmarks.llm.batching import DECODES, PROMPT_TOKENS, Served, StepTimes, Work, at_equal_p99, mixture, serve

TWO = Work(arrivals=(0.0, 1.0), prompts=((1, 2), (3,)), outputs=(3, 1))


def test_a_late_request_joins_a_continuous_batch_and_waits_for_a_static_one() -> None:
    # Steps of one second. Continuous: the second request is answered in step 2, beside the first one's second token.
    ours = serve(TWO, "continuous", lambda output: 1.0, 16, 4)
    assert (ours.p99_s, ours.mean_s, ours.tokens_per_s) == (3.0, 2.0, pytest.approx(4 / 3))
    # Static: it starts in step 4, when the first is done after 3 seconds.
    theirs = serve(TWO, "static", lambda output: 1.0, 16, 4)
    assert (theirs.p99_s, theirs.mean_s, theirs.tokens_per_s) == (3.0, 3.0, 1.0)


def test_nobody_waits_before_the_first_arrival() -> None:
    late = Work(arrivals=(5.0,), prompts=((1,),), outputs=(2,))
    assert serve(late, "continuous", lambda output: 0.5, 16, 4) == Served(0.2, 2.0, 1.0, 1.0)


def test_another_rate_changes_when_requests_arrive_and_nothing_else() -> None:
    slow, fast = Work.poisson(1.0, 50), Work.poisson(4.0, 50)
    assert slow.prompts == fast.prompts and slow.outputs == fast.outputs
    np.testing.assert_allclose(slow.arrivals, np.multiply(fast.arrivals, 4.0))
    lengths = [len(p) for p in slow.prompts] + list(slow.outputs)
    assert min(lengths) >= 8 and max(lengths) <= 256


def test_step_times_lie_between_what_was_measured() -> None:
    table = np.add.outer(10.0 * np.array(DECODES), np.array(PROMPT_TOKENS, dtype=float))
    times = StepTimes(table)
    assert times(mixture(3, 0, 32)) == 30.0
    assert times(mixture(0, 40, 32)) == 40.0
    assert times(mixture(24, 100, 32)) == 340.0


def test_the_fastest_run_with_the_same_p99_is_found() -> None:
    def simulate(batching: str, rate: float) -> Served:
        assert batching == "continuous"
        return Served(rate, 10 * rate, p99_s=2 * rate, mean_s=rate)

    found = at_equal_p99(simulate, Served(1.0, 10.0, p99_s=6.0, mean_s=1.0))
    assert 2.98 < found.rate <= 3.0
