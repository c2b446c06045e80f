"""From records to figures. Pure; every figure can be computed again from the numbers printed beside it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from perf.errors import UsageError
from perf.records import OK, Records

DEFAULT_PERCENTILES = (50.0, 90.0, 95.0, 99.0)
STABLE_WINDOWS = 3  # as perf_analyzer: the last three windows must agree
LEAST_ACHIEVED = 0.95  # of the rate asked for; below it a result is flagged
_CDF_POINTS = 100


@dataclass(frozen=True)
class Latency:
    """Latency of the requests that succeeded, in milliseconds.

    Attributes:
        samples: how many requests these figures stand on.
        percentiles: "p99" -> nearest-rank percentile over all samples at once.
        unsupported: percentiles with fewer samples than they need to mean anything (p99 needs 100).
        cdf: (ms, share of the requests at most that slow), for the chart.
    """

    samples: int
    mean: float
    std: float
    low: float
    high: float
    percentiles: dict[str, float]
    unsupported: tuple[str, ...]
    cdf: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Window:
    """One measurement window, as the stability rule sees it."""

    duration_s: float
    completed: int
    throughput_rps: float
    latency_ms: float | None


@dataclass(frozen=True)
class Spread:
    """A figure over repeats or windows: the median, and the interval from the lowest to the highest."""

    median: float
    low: float
    high: float

    def overlaps(self, other: Spread) -> bool:
        """True when the two intervals share a value: the difference may be chance."""
        return self.low <= other.high and other.low <= self.high


def nearest_rank(ordered: npt.NDArray[np.float64], percentile: float) -> float:
    """The smallest sample that at least `percentile` % of the samples do not exceed.

    Always a latency that a request had, never a value between two.

    Args:
        ordered: samples in ascending order, at least one.
        percentile: above 0, at most 100.
    """
    rank = math.ceil(percentile / 100 * len(ordered) - 1e-9)
    return float(ordered[max(rank, 1) - 1])


def samples_needed(percentile: float) -> int:
    """How many samples it takes for one of them to lie beyond the percentile: 100 for p99, 2 for p50."""
    return 1 if percentile >= 100 else math.ceil(100 / (100 - percentile) - 1e-9)


def percentile_name(percentile: float) -> str:
    return f"p{percentile:g}"


def summarise_latency(
    latency_ms: npt.NDArray[np.float64], percentiles: Sequence[float] = DEFAULT_PERCENTILES
) -> Latency | None:
    """The figures of all samples pooled, or None when there are none. Percentiles cannot be averaged."""
    if len(latency_ms) == 0:
        return None
    ordered = np.sort(latency_ms)
    shares = np.linspace(0, 100, _CDF_POINTS + 1)[1:]
    return Latency(
        samples=len(ordered),
        mean=float(ordered.mean()),
        std=float(ordered.std()),
        low=float(ordered[0]),
        high=float(ordered[-1]),
        percentiles={percentile_name(p): nearest_rank(ordered, p) for p in percentiles},
        unsupported=tuple(percentile_name(p) for p in percentiles if len(ordered) < samples_needed(p)),
        cdf=((float(ordered[0]), 0.0), *((nearest_rank(ordered, s), float(s) / 100) for s in shares)),
    )


def throughput_rps(completed: int, window_s: float) -> float:
    """Requests completed in the window / its length, whatever was sent before or ends after (h06)."""
    return completed / window_s if window_s > 0 else 0.0


def summarise_window(records: Records, percentile: float | None) -> Window:
    """What the stability rule looks at: throughput, and the mean latency or the percentile given."""
    latency = np.sort(records.latency_ms)
    if len(latency) == 0:
        figure = None
    else:
        figure = float(latency.mean()) if percentile is None else nearest_rank(latency, percentile)
    return Window(
        duration_s=records.duration_s,
        completed=records.completed,
        throughput_rps=throughput_rps(records.completed, records.duration_s),
        latency_ms=figure,
    )


def is_stable(windows: Sequence[Window], percentage: float) -> bool:
    """perf_analyzer's rule: the last three windows lie within `percentage` % of their average in throughput
    and in latency. A window without a success is never stable."""
    last = windows[-STABLE_WINDOWS:]
    if len(last) < STABLE_WINDOWS:
        return False
    latencies = [window.latency_ms for window in last if window.latency_ms is not None]
    if len(latencies) < STABLE_WINDOWS:
        return False
    return all(
        abs(figure - sum(figures) / len(figures)) <= percentage / 100 * sum(figures) / len(figures)
        for figures in ([window.throughput_rps for window in last], latencies)
        for figure in figures
    )


def parse_limits(texts: Sequence[str], known: Sequence[str]) -> dict[str, float]:
    """Goodput limits from "name:milliseconds", several in one text parted by spaces (aiperf's syntax).

    Raises:
        UsageError: a name that this run does not measure, or no number.
    """
    limits: dict[str, float] = {}
    for item in " ".join(texts).split():
        name, _, value = item.partition(":")
        if name not in known:
            raise UsageError(f"goodput limit {item!r}: {name!r} is not measured here; allowed: {', '.join(known)}")
        try:
            limits[name] = float(value)
        except ValueError as error:
            raise UsageError(f"goodput limit {item!r} needs milliseconds, as in {name}:50") from error
        if not 0 < limits[name] < float("inf"):
            raise UsageError(f"goodput limit {item!r} must be above 0 ms")
    return limits


def count_good(
    figures_ms: Mapping[str, npt.NDArray[np.float64]],
    succeeded: npt.NDArray[np.bool_],
    limits: Mapping[str, float],
) -> int:
    """Requests that succeeded and meet every limit. A failure is a miss, however fast it was (h07, h16).

    Args:
        figures_ms: name -> one figure per request.  # [num_requests]
        succeeded: one flag per request.  # [num_requests]
        limits: name -> the most milliseconds allowed.
    """
    good = succeeded.copy()
    for name, limit in limits.items():
        good &= figures_ms[name] <= limit
    return int(np.count_nonzero(good))


def goodput_rps(records: Records, limits: Mapping[str, float]) -> float:
    """Good requests that ended in the window / length of the window."""
    figures: dict[str, npt.NDArray[Any]] = {
        "request_latency": (records.done_ns - records.intended_ns) / 1e6,
    }
    return throughput_rps(count_good(figures, records.error == OK, limits), records.duration_s)


def spread(figures: Sequence[float]) -> Spread:
    """Median, lowest and highest of at least one figure."""
    ordered = sorted(figures)
    middle = len(ordered) // 2
    median = ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
    return Spread(median=median, low=ordered[0], high=ordered[-1])
