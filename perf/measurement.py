"""Measures one level of load: windows until stable, the server's counters around them, what to beware of."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from perf.arrivals import Arrivals, OpenLoop
from perf.load_generator import LoadGenerator, Target, connections_for, make_sender, run_event_loop, warm_up
from perf.metrics import (
    DEFAULT_PERCENTILES,
    LEAST_ACHIEVED,
    STABLE_WINDOWS,
    Latency,
    Window,
    goodput_rps,
    is_stable,
    nearest_rank,
    summarise_latency,
    summarise_window,
    throughput_rps,
)
from perf.records import Records
from perf.server_stats import CounterReader, Counters, ModelActivity, activity_between
from perf.workload import Workload

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """How to measure; the defaults are perf_analyzer's.

    Attributes:
        interval_s: length of a window.
        stability_percentage: how far the last three windows may lie from their average.
        max_trials: windows at most.
        warmup_requests: sent and forgotten before the first window.
        request_count: exactly so many requests in one window, in place of windows.
        percentile: judge stability by this percentile, not by the mean.
        goodput_limits_ms: name -> milliseconds; empty for no goodput.
        repeats: how often to measure every level.
    """

    interval_s: float = 5.0
    stability_percentage: float = 10.0
    max_trials: int = 10
    warmup_requests: int = 0
    request_count: int | None = None
    percentile: float | None = None
    goodput_limits_ms: dict[str, float] = field(default_factory=dict)
    repeats: int = 1

    @property
    def percentiles(self) -> tuple[float, ...]:
        """The percentiles to report."""
        extra = () if self.percentile is None else (self.percentile,)
        return tuple(sorted({*DEFAULT_PERCENTILES, *extra}))


@dataclass(frozen=True)
class ErrorCount:
    """How many requests failed in one way, with the first message."""

    kind: str
    count: int
    message: str


@dataclass(frozen=True)
class Measurement:
    """One level of load, measured once. Rates are per second of `duration_s`, latency is in milliseconds.

    Attributes:
        completed: requests that succeeded within the window.
        inferences_rps: `throughput_rps` x batch size.
        latency: of the requests that succeeded; None when none did.
        goodput_rps: requests within every limit per second; None when no limit was given.
        asked_rps: the rate asked for; None in a closed loop.
        achieved_rps: the rate at which requests were sent; None in a closed loop.
        send_lag_p99_ms: how late the client sent; part of every latency. None in a closed loop.
        outstanding: requests due and not answered when the window ended.
        stable: None when it was not judged, for lack of three windows.
        windows: all windows, the last three of which are reported.
        server: what the models did meanwhile; empty when the server gives no statistics.
        gpu_utilisation: None: not available, as nothing here reads a GPU.
    """

    mode: str
    duration_s: float
    completed: int
    failed: int
    errors: tuple[ErrorCount, ...]
    throughput_rps: float
    inferences_rps: float
    latency: Latency | None
    goodput_rps: float | None
    asked_rps: float | None
    achieved_rps: float | None
    send_lag_p99_ms: float | None
    outstanding: int
    stable: bool | None
    windows: tuple[Window, ...]
    server: tuple[ModelActivity, ...]
    warnings: tuple[str, ...]
    gpu_utilisation: float | None = None


@dataclass(frozen=True)
class Run:
    """What one run of the load left: all its records, the windows' borders, a reading at each border."""

    records: Records
    borders_ns: tuple[int, ...]
    readings: tuple[list[Counters], ...]


def measure_level(
    target: Target,
    workload: Workload,
    arrivals: Arrivals,
    settings: Settings,
    counters: CounterReader | None = None,
    ensembles: frozenset[str] = frozenset(),
    progress: Progress | None = None,
) -> Measurement:
    """Measure one level of load once. Blocks until the last request in flight has ended.

    Args:
        target: where requests go.
        workload: what is sent.
        arrivals: when.
        settings: how long, and when it is enough.
        counters: reads the server's counters; None reports none.
        ensembles: which of the models that are read are ensembles.
        progress: is told of each window.
    """
    reader = counters or CounterReader(read=list, calls={})
    say = progress or (lambda text: None)
    run = run_event_loop(
        lambda: _run_windows(target, workload, arrivals, settings, reader, say), connections_for(arrivals)
    )
    return summarise(run, arrivals, settings, workload.batch_size, ensembles)


async def _run_windows(
    target: Target,
    workload: Workload,
    arrivals: Arrivals,
    settings: Settings,
    reader: CounterReader,
    say: Progress,
) -> Run:
    sender = make_sender(target)
    try:
        await sender.open(connections_for(arrivals))
        cold = await asyncio.to_thread(reader.read)
        await warm_up(sender, workload, arrivals, settings.warmup_requests)
        generator = LoadGenerator(sender, workload.payloads, arrivals)
        readings = [await asyncio.to_thread(reader.settled, cold, settings.warmup_requests)]
        borders = [time.perf_counter_ns()]
        running = asyncio.create_task(generator.run(settings.request_count))
        if settings.request_count is not None:
            await running
            borders.append(time.perf_counter_ns() + 1)  # a window ends before its border: the last request is inside
            answered = generator.records.freeze(arrivals.mode, borders[0], borders[-1]).window(*borders).completed
            readings.append(await asyncio.to_thread(reader.settled, readings[0], answered))
        else:
            windows: list[Window] = []
            while len(windows) < settings.max_trials and not is_stable(windows, settings.stability_percentage):
                await asyncio.wait({running}, timeout=settings.interval_s)
                borders.append(time.perf_counter_ns())
                so_far = generator.records.freeze(arrivals.mode, borders[0], borders[-1])
                windows.append(summarise_window(so_far.window(*borders[-2:]), settings.percentile))
                readings.append(await asyncio.to_thread(reader.read))
                say(f"window {len(windows)}: {windows[-1].throughput_rps:.1f} requests/s")
            generator.stop()
            await running
        return Run(generator.records.freeze(arrivals.mode, borders[0], borders[-1]), tuple(borders), tuple(readings))
    finally:
        await sender.close()


def summarise(
    run: Run, arrivals: Arrivals, settings: Settings, batch_size: int, ensembles: frozenset[str] = frozenset()
) -> Measurement:
    """The figures of the last three windows, their requests pooled. Pure."""
    borders = run.borders_ns
    windows = tuple(
        summarise_window(run.records.window(start, end), settings.percentile) for start, end in pairwise(borders)
    )
    first = max(0, len(windows) - STABLE_WINDOWS)
    start_ns, end_ns = borders[first], borders[-1]
    pooled = run.records.window(start_ns, end_ns)
    duration_s = (end_ns - start_ns) / 1e9
    latency = summarise_latency(pooled.latency_ms, settings.percentiles)
    judged = settings.request_count is None and settings.max_trials >= STABLE_WINDOWS
    throughput = throughput_rps(pooled.completed, duration_s)
    open_loop = isinstance(arrivals, OpenLoop)
    achieved = run.records.sent_between(start_ns, end_ns) / duration_s if open_loop else None
    lag = np.sort(pooled.send_lag_ms) if open_loop else np.empty(0)
    measurement = Measurement(
        mode=arrivals.mode,
        duration_s=duration_s,
        completed=pooled.completed,
        failed=pooled.failed,
        errors=tuple(ErrorCount(error.kind, count, error.message) for error, count in pooled.errors_by_kind().items()),
        throughput_rps=throughput,
        inferences_rps=throughput * batch_size,
        latency=latency,
        goodput_rps=goodput_rps(pooled, settings.goodput_limits_ms) if settings.goodput_limits_ms else None,
        asked_rps=arrivals.rate_per_s if isinstance(arrivals, OpenLoop) else None,
        achieved_rps=achieved,
        send_lag_p99_ms=nearest_rank(lag, 99) if len(lag) else None,
        outstanding=run.records.outstanding_at(end_ns),
        stable=is_stable(windows, settings.stability_percentage) if judged else None,
        windows=windows,
        # Without a reading before, the counters since the server's start would pass for those of this run.
        server=activity_between(run.readings[first], run.readings[-1], ensembles) if run.readings[first] else (),
        warnings=(),
    )
    return replace(measurement, warnings=tuple(_warnings(measurement, settings)))


def _warnings(measurement: Measurement, settings: Settings) -> list[str]:
    """What a reader must know before using the figures."""
    found: list[str] = []
    total = measurement.completed + measurement.failed
    if measurement.latency is None:
        found.append("every request failed" if total else "no request ended within the window; measure longer")
    if measurement.failed:
        kinds = "; ".join(f"{error.count} x {error.kind}: {error.message:.200}" for error in measurement.errors)
        found.append(f"{measurement.failed} of {total} requests failed, misses without a latency ({kinds})")
    if measurement.stable is False:
        found.append(
            f"unstable: the last {STABLE_WINDOWS} windows differ by more than "
            f"{settings.stability_percentage:g} % after {len(measurement.windows)} windows"
        )
    found += _rate_warnings(measurement)
    if measurement.latency is not None and measurement.latency.unsupported:
        names = ", ".join(measurement.latency.unsupported)
        found.append(f"{measurement.latency.samples} samples are too few for {names}")
    return found


def _rate_warnings(measurement: Measurement) -> list[str]:
    """Says when an open loop is not the load that was asked for, and whose doing that is."""
    asked, achieved, lag = measurement.asked_rps, measurement.achieved_rps, measurement.send_lag_p99_ms
    if asked is None or achieved is None:
        return []
    if achieved < LEAST_ACHIEVED * asked:
        # A client that sends less than it should falls behind its schedule by as much; chance does not.
        behind = lag is None or lag / 1e3 > (1 - LEAST_ACHIEVED) * measurement.duration_s
        cause = "the client fell behind" if behind else "by chance of the arrivals; measure longer"
        return [f"asked for {asked:g} requests/s, sent {achieved:.1f}: below 95 %, {cause}"]
    if measurement.throughput_rps < LEAST_ACHIEVED * achieved:
        return [
            f"sent {achieved:.1f} requests/s, the server completed {measurement.throughput_rps:.1f}; "
            f"{measurement.outstanding} had no answer at the end"
        ]
    return []
