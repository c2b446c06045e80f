"""From the options of `perf-report run` to loads, settings and shapes. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perf.arrivals import Arrivals, ClosedLoop, OpenLoop, parse_range
from perf.errors import UsageError
from perf.measurement import Settings
from perf.metrics import parse_limits

GOODPUT_METRICS = ("request_latency",)  # time to first token and the like need streaming


def read_loads(options: Mapping[str, Any]) -> list[Arrivals]:
    """The levels of `--concurrency-range` or `--request-rate-range`; concurrency 1 when neither is given."""
    concurrency, rate = options["concurrency_range"], options["request_rate_range"]
    if concurrency and rate:
        raise UsageError("--concurrency-range is a closed loop and --request-rate-range an open one; give one of them")
    if rate is None:
        return [ClosedLoop(int(level)) for level in parse_range(concurrency or "1", whole=True)]
    return [
        OpenLoop(level, options["request_distribution"], options["burstiness"], options["random_seed"])
        for level in parse_range(rate, whole=False)
    ]


def read_settings(options: Mapping[str, Any]) -> Settings:
    """How long to measure and what to judge by."""
    return Settings(
        interval_s=options["measurement_interval"] / 1000,
        stability_percentage=options["stability_percentage"],
        max_trials=options["max_trials"],
        warmup_requests=options["warmup_request_count"],
        request_count=options["request_count"],
        percentile=options["percentile"],
        goodput_limits_ms=parse_limits(options["goodput"], GOODPUT_METRICS),
        repeats=options["repeats"],
    )


def read_shapes(texts: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    """Shapes by input name, from NAME:D1,D2; a name may hold colons."""
    shapes = {}
    for text in texts:
        name, _, sizes = text.rpartition(":")
        try:
            shapes[name] = tuple(int(size) for size in sizes.split(","))
        except ValueError as error:
            raise UsageError(f"--shape {text!r} must be NAME:D1,D2, as in input_ids:128") from error
        if not name:
            raise UsageError(f"--shape {text!r} must be NAME:D1,D2, as in input_ids:128")
    return shapes
