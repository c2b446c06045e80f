"""Figures computed by hand: percentiles, throughput, goodput, stability, spread."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perf.arrivals import ClosedLoop, OpenLoop
from perf.errors import UsageError
from perf.measurement import Run, Settings, summarise
from perf.metrics import (
    Spread,
    Window,
    count_good,
    goodput_rps,
    is_stable,
    nearest_rank,
    parse_limits,
    samples_needed,
    spread,
    summarise_latency,
    summarise_window,
    throughput_rps,
)
from perf.records import RecordBuffer
from tests.perf.builders import MS, SECOND, measurement_of, records_of


def test_nearest_rank_by_hand() -> None:
    samples = np.array([15.0, 20, 35, 40, 50])
    assert [nearest_rank(samples, p) for p in (5, 30, 40, 50, 100)] == [15, 20, 20, 35, 50]


@given(
    st.lists(st.floats(0, 1e6), min_size=1, max_size=200),
    st.sampled_from([0.1, 1, 25, 50, 90, 95, 99, 99.9, 100]),
)
def test_nearest_rank_is_its_definition(samples: list[float], percentile: float) -> None:
    found = nearest_rank(np.sort(np.array(samples)), percentile)
    candidates = [s for s in samples if sum(other <= s for other in samples) * 100 >= percentile * len(samples) - 1e-6]
    assert found == min(candidates)


def test_h14_percentiles_are_pooled_and_never_averaged() -> None:
    first, second = [1.0] * 90 + [100.0] * 10, [1.0] * 900
    pooled = summarise_latency(np.array(first + second))
    assert pooled is not None and pooled.samples == 1000
    assert pooled.percentiles["p99"] == 1.0
    # What averaging would have said.
    averages = [nearest_rank(np.sort(np.array(part)), 99) for part in (first, second)]
    assert sum(averages) / 2 == 50.5


def test_h14_windows_of_one_measurement_are_pooled() -> None:
    buffer = RecordBuffer()
    for latency in [1] * 90 + [100] * 10:
        buffer.add(0, 0, latency * MS)
    for _ in range(900):
        buffer.add(SECOND, SECOND, SECOND + MS)
    run = Run(buffer.freeze("closed", 0, 2 * SECOND), (0, SECOND, 2 * SECOND), ([], [], []))
    latency = summarise(run, ClosedLoop(1), Settings(), batch_size=1).latency
    assert latency is not None and latency.percentiles["p99"] == 1.0


@pytest.mark.parametrize(
    ("samples", "unsupported"),
    [(99, ("p99",)), (100, ()), (19, ("p95", "p99")), (1, ("p50", "p90", "p95", "p99"))],
)
def test_h14_percentiles_without_enough_samples_are_marked(samples: int, unsupported: tuple[str, ...]) -> None:
    latency = summarise_latency(np.ones(samples))
    assert latency is not None and latency.unsupported == unsupported


def test_samples_needed() -> None:
    assert [samples_needed(p) for p in (50, 90, 95, 99, 99.9, 100)] == [2, 10, 20, 100, 1000, 1]


def test_latency_without_samples_is_none_and_not_zero() -> None:
    assert summarise_latency(np.array([])) is None


def test_latency_figures_by_hand() -> None:
    latency = summarise_latency(np.array([4.0, 1, 2, 3]))
    assert latency is not None
    assert (latency.mean, latency.low, latency.high) == (2.5, 1, 4)
    assert latency.std == pytest.approx(math.sqrt(1.25))
    assert latency.cdf[0] == (1, 0) and latency.cdf[-1] == (4, 1)
    assert latency.cdf[25] == (1, 0.25) and latency.cdf[26] == (2, 0.26)


def test_h06_throughput_is_completed_in_the_window_over_the_window() -> None:
    # Seven requests of 5 s, one after the other, watched for 10 s: two end inside.
    buffer = RecordBuffer()
    for index in range(7):
        buffer.add(index * 5 * SECOND, index * 5 * SECOND, (index + 1) * 5 * SECOND - 1)
    window = buffer.freeze("closed", 0, 10 * SECOND).window(0, 10 * SECOND)
    assert (window.completed, window.duration_s) == (2, 10.0)
    assert throughput_rps(window.completed, window.duration_s) == 0.2
    # Seven that end within it.
    assert throughput_rps(records_of([5000] * 7, duration_s=10).completed, 10.0) == 0.7


def test_h06_a_request_counts_where_it_ends() -> None:
    buffer = RecordBuffer()
    for done in (0, SECOND - 1, SECOND):
        buffer.add(-SECOND, -SECOND, done)
    records = buffer.freeze("closed", 0, 2 * SECOND)
    assert records.window(0, SECOND).completed == 2
    assert records.window(SECOND, 2 * SECOND).completed == 1


def test_h07_errors_are_counted_and_have_no_latency() -> None:
    records = records_of([10.0] * 18 + [0.1] * 2, failed=(18, 19), duration_s=2)
    assert (records.completed, records.failed) == (18, 2)
    latency = summarise_latency(records.latency_ms)
    assert latency is not None and latency.samples == 18 and latency.low == 10.0
    assert throughput_rps(records.completed, records.duration_s) == 9
    # A failure in 0.1 ms is a miss for any limit.
    assert goodput_rps(records, {"request_latency": 50}) == 9
    ((kind, count),) = records.errors_by_kind().items()
    assert (kind.kind, kind.message, count) == ("http 500", "broken", 2)


def test_h16_goodput_needs_every_limit() -> None:
    figures = {
        "time_to_first_token": np.array([50.0, 100, 90, 20, 99]),
        "request_latency": np.array([500.0, 800, 801, 300, 799]),
    }
    good = count_good(figures, np.ones(5, bool), {"time_to_first_token": 100, "request_latency": 800})
    assert good == 4
    assert throughput_rps(good, 8.0) == 0.5


def test_h16_limits_are_parsed_or_refused() -> None:
    assert parse_limits(("request_latency:50 ttft:5",), ("request_latency", "ttft")) == {
        "request_latency": 50,
        "ttft": 5,
    }
    for text, part in (
        ("time_to_first_token:5", "allowed: request_latency"),
        ("request_latency", "request_latency:50"),
        ("request_latency:x", "request_latency:50"),
        ("request_latency:0", "above 0"),
    ):
        with pytest.raises(UsageError, match=part):
            parse_limits((text,), ("request_latency",))


def window(rate: float, latency: float | None) -> Window:
    return Window(1.0, int(rate), rate, latency)


def test_h03_stability_is_that_of_the_last_three_windows() -> None:
    steady = [window(100, 10), window(110, 10), window(90, 10)]
    assert is_stable(steady, 10)
    assert not is_stable(steady, 9.9)
    assert not is_stable(steady[:2], 50)
    assert is_stable([window(5, 500), *steady], 10)
    assert not is_stable([window(100, 5), window(100, 50), window(100, 5)], 10)
    assert not is_stable([window(100, 10), window(0, None), window(100, 10)], 100)


def test_h03_too_few_trials_report_without_a_verdict() -> None:
    buffer = RecordBuffer()
    for index in range(10):
        buffer.add(index * MS, index * MS, (index + 5) * MS)
    run = Run(buffer.freeze("closed", 0, SECOND), (0, SECOND), ([], []))
    measured = summarise(run, ClosedLoop(1), Settings(max_trials=1), batch_size=4)
    assert measured.stable is None
    assert (measured.completed, measured.throughput_rps, measured.inferences_rps) == (10, 10, 40)


def test_h13_a_rate_that_was_not_reached_is_said() -> None:
    # 400/s for 3 s of a schedule of 1000/s: the last request is 1.8 s late
    measured = measurement_of([1.0] * 400, OpenLoop(1000), Settings(), lag_ms=1800)
    assert (measured.asked_rps, measured.achieved_rps, measured.send_lag_p99_ms) == (1000, 400, 1800)
    assert measured.warnings == ("asked for 1000 requests/s, sent 400.0: below 95 %, the client fell behind",)
    reached = measurement_of([1.0] * 380, OpenLoop(400), Settings())
    assert reached.achieved_rps == 380 and reached.warnings == ()


def test_h13_few_arrivals_by_chance_are_not_blamed_on_the_client() -> None:
    (warning,) = measurement_of([1.0] * 370, OpenLoop(400, "poisson"), Settings()).warnings
    assert "sent 370.0: below 95 %, by chance of the arrivals" in warning


def test_h13_a_server_that_does_not_keep_up_is_named() -> None:
    # Sent in the first half of each second, 1.75 s long: half of the second second's end in time.
    measured = measurement_of([1750.0] * 100, OpenLoop(100), Settings())
    assert (measured.achieved_rps, measured.outstanding) == (100, 150)
    assert measured.throughput_rps == 50
    assert "sent 100.0 requests/s, the server completed 50.0; 150 had no answer at the end" in measured.warnings


def test_h13_a_closed_loop_has_no_asked_rate() -> None:
    measured = measurement_of([1.0] * 100, ClosedLoop(1), Settings())
    assert (measured.asked_rps, measured.achieved_rps, measured.send_lag_p99_ms) == (None, None, None)


def test_h17_gpu_figures_are_absent_and_not_zero() -> None:
    assert measurement_of([1.0], ClosedLoop(1), Settings()).gpu_utilisation is None


def test_open_loop_latency_counts_from_when_it_was_due() -> None:
    buffer = RecordBuffer()
    buffer.add(intended_ns=0, sent_ns=40 * MS, done_ns=50 * MS)
    records = buffer.freeze("open", 0, SECOND)
    assert records.latency_ms.tolist() == [50]
    assert records.send_lag_ms.tolist() == [40]


def test_outstanding_and_sent() -> None:
    buffer = RecordBuffer()
    for due, sent, done in ((0, 0, 5), (2, 3, 20), (4, 9, 21), (12, 12, 13)):
        buffer.add(due, sent, done)
    records = buffer.freeze("open", 0, 10)
    assert records.outstanding_at(10) == 2
    assert records.sent_between(0, 10) == 3
    assert records.sent_between(3, 9) == 1


def test_window_by_percentile_or_mean() -> None:
    records = records_of([1, 2, 3, 10])
    assert summarise_window(records, None).latency_ms == 4
    assert summarise_window(records, 50).latency_ms == 2
    assert summarise_window(records_of([1], failed=(0,)), None).latency_ms is None


def test_h04_spread_and_overlap() -> None:
    assert spread([5, 1, 3]) == Spread(3, 1, 5)
    assert spread([1, 2, 3, 10]) == Spread(2.5, 1, 10)
    assert Spread(2, 1, 3).overlaps(Spread(4, 3, 5))
    assert not Spread(2, 1, 3).overlaps(Spread(5, 3.1, 6))
