"""The report: every level of a run, what was asked, and where it ran. Draws nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from perf.arrivals import Arrivals, OpenLoop
from perf.environment import Environment
from perf.json_form import document_from_json, report_from_document
from perf.load_generator import Target
from perf.measurement import Measurement, Settings, measure_level
from perf.metrics import STABLE_WINDOWS, Spread, spread
from perf.server_stats import CounterReader
from perf.workload import Workload

SCHEMA = "modelkiln.perf_report/1"


@dataclass(frozen=True)
class Subject:
    """What was measured."""

    model: str
    version: str
    platform: str
    protocol: str
    address: str
    server: str
    batch_size: int
    workload: str
    ensembles: tuple[str, ...] = ()


@dataclass(frozen=True)
class Level:
    """One level of load and its measurements, one for each repeat.

    Attributes:
        load: in words, "concurrency 4".
        value: concurrency, or requests per second.
        distribution: of the arrivals; None in a closed loop.
        measurements: in the order in which they were taken.
    """

    load: str
    value: float
    distribution: str | None
    measurements: tuple[Measurement, ...]

    @property
    def typical(self) -> Measurement:
        """The measurement of median throughput: a real one, so that its figures belong together."""
        ordered = sorted(self.measurements, key=lambda one: one.throughput_rps)
        return ordered[(len(ordered) - 1) // 2]

    @property
    def throughput(self) -> Spread:
        """Requests per second over the repeats.

        When there was one measurement: its own, between the lowest and the highest of its last three windows.
        """
        if len(self.measurements) > 1:
            return spread([one.throughput_rps for one in self.measurements])
        windows = spread([window.throughput_rps for window in self.typical.windows[-STABLE_WINDOWS:]])
        return replace(windows, median=self.typical.throughput_rps)

    def latency(self, percentile: str) -> Spread | None:
        """One percentile over the repeats; None where a repeat has no latency."""
        figures = [
            one.latency.percentiles[percentile]
            for one in self.measurements
            if one.latency is not None and percentile in one.latency.percentiles
        ]
        return spread(figures) if figures and len(figures) == len(self.measurements) else None


@dataclass(frozen=True)
class Report:
    """Everything that a reader needs to judge the figures, and to take them again."""

    schema: str
    created: str
    command: str
    mode: str
    subject: Subject
    settings: Settings
    environment: Environment
    levels: tuple[Level, ...]

    @property
    def all_failed(self) -> bool:
        """True when no request of the whole run succeeded."""
        return not any(one.completed for level in self.levels for one in level.measurements)

    @property
    def unstable(self) -> bool:
        return any(one.stable is False for level in self.levels for one in level.measurements)

    @property
    def percentile_names(self) -> tuple[str, ...]:
        return tuple(f"p{percentile:g}" for percentile in self.settings.percentiles)


def measure(
    subject: Subject,
    target: Target,
    workload: Workload,
    loads: Sequence[Arrivals],
    settings: Settings,
    *,
    environment: Environment,
    created: str,
    command: str,
    counters: CounterReader | None = None,
    progress: Callable[[int, str], None] | None = None,
) -> Report:
    """Measure every level of `loads`, each `settings.repeats` times. The one way, for all callers.

    The whole list is gone through before it is repeated, so that a drift of the machine does not look like a
    difference between levels.

    Args:
        subject: what is measured, for the report.
        target: where requests go.
        workload: what is sent.
        loads: levels of one mode.
        settings: how to measure.
        environment: where, for the report.
        created: date and time, ISO 8601.
        command: what reproduces the report.
        counters: reads the server's counters.
        progress: is told how many measurements are done, and in a line what happens now.
    """
    say = progress or (lambda done, text: None)
    taken: list[list[Measurement]] = [[] for _ in loads]
    for repeat in range(settings.repeats):
        for index, load in enumerate(loads):
            suffix = f", repeat {repeat + 1} of {settings.repeats}" if settings.repeats > 1 else ""
            title = f"{load}{suffix}"
            done = repeat * len(loads) + index
            say(done, title)
            taken[index].append(
                measure_level(
                    target,
                    workload,
                    _repeated(load, repeat),
                    settings,
                    counters,
                    frozenset(subject.ensembles),
                    lambda text, done=done, title=title: say(done, f"{title}: {text}"),  # type: ignore[misc]
                )
            )
    levels = tuple(
        Level(str(load), load.level, load.distribution if isinstance(load, OpenLoop) else None, tuple(measured))
        for load, measured in zip(loads, taken, strict=True)
    )
    return Report(SCHEMA, created, command, loads[0].mode, subject, settings, environment, levels)


def _repeated(load: Arrivals, repeat: int) -> Arrivals:
    """Other arrivals for each repeat: with the same ones the spread would leave out the chance in them."""
    return replace(load, seed=load.seed + repeat) if isinstance(load, OpenLoop) else load


def from_json(text: str, source: str) -> Report:
    """A report from its JSON form; raises `UsageError`, naming `source`, when it is none."""
    report: Report = report_from_document(Report, SCHEMA, document_from_json(text, source), source)
    return report
