"""Records and reports with figures that a test can compute by hand."""

from __future__ import annotations

from collections.abc import Sequence

from perf.arrivals import ClosedLoop, OpenLoop
from perf.environment import Environment
from perf.measurement import Measurement, Run, Settings, summarise
from perf.records import RecordBuffer, Records
from perf.report import SCHEMA, Level, Report, Subject
from perf.server_stats import parse_counters

MS = 1_000_000  # in nanoseconds
SECOND = 1000 * MS


def records_of(
    latencies_ms: Sequence[float],
    *,
    failed: Sequence[int] = (),
    duration_s: float = 1.0,
    mode: str = "closed",
) -> Records:
    """Requests that were all due at 0; those whose index is in `failed` failed."""
    buffer = RecordBuffer()
    for index, latency in enumerate(latencies_ms):
        code = buffer.error_code("http 500", "broken") if index in failed else 0
        buffer.add(0, 0, round(latency * MS), code)
    return buffer.freeze(mode, 0, round(duration_s * SECOND))


def measurement_of(
    latencies_ms: Sequence[float],
    load: ClosedLoop | OpenLoop,
    settings: Settings,
    failed: Sequence[int] = (),
    lag_ms: int = 0,
) -> Measurement:
    """Three equal windows of one second, each with these requests, `lag_ms` after they were due."""
    buffer = RecordBuffer()
    for window in range(3):
        for index, latency in enumerate(latencies_ms):
            sent = window * SECOND + index * SECOND // (2 * len(latencies_ms))
            code = buffer.error_code("http 500", "<script>alert(1)</script>") if index in failed else 0
            buffer.add(sent - lag_ms * MS, sent, sent + round(latency * MS), code)
    records = buffer.freeze(load.mode, 0, 3 * SECOND)
    borders = tuple(window * SECOND for window in range(4))
    readings = tuple(parse_counters([statistics(window * len(latencies_ms))]) for window in range(4))
    return summarise(Run(records, borders, readings), load, settings, batch_size=1)


def statistics(inferences: int) -> dict[str, object]:
    """Triton's counters after so many inferences, each of a batch of its own."""
    phase = {"count": str(inferences), "ns": str(inferences * MS)}
    return {
        "name": "fake<b>",
        "version": "1",
        "inference_count": str(inferences),
        "execution_count": str(inferences),
        "inference_stats": {name: phase for name in ("queue", "compute_input", "compute_infer", "compute_output")},
        "batch_stats": [{"batch_size": "1", "compute_infer": phase}],
    }


def report_of(
    loads: Sequence[ClosedLoop | OpenLoop],
    latencies_ms: Sequence[Sequence[float]],
    settings: Settings | None = None,
    failed: Sequence[int] = (),
) -> Report:
    """A report in which every repeat of a level has the latencies given for that repeat."""
    settings = settings or Settings(repeats=len(latencies_ms))
    levels = tuple(
        Level(
            str(load),
            load.level,
            load.distribution if isinstance(load, OpenLoop) else None,
            tuple(measurement_of(repeat, load, settings, failed) for repeat in latencies_ms),
        )
        for load in loads
    )
    subject = Subject("fake<b>", "1", "python", "grpc", "127.0.0.1:8001", "triton 2.51.0", 1, "random & inputs")
    environment = Environment("host", "A CPU", 2, "Linux 6", "3.11", "1.85", True)
    command = "perf-report run -m 'fake<b>'"
    return Report(SCHEMA, "2026-01-02T03:04:05+00:00", command, loads[0].mode, subject, settings, environment, levels)
