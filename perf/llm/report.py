"""The report on a language model: every level of a run, what was asked, and where it ran. Draws nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from perf.arrivals import Arrivals, OpenLoop
from perf.environment import Environment
from perf.errors import UsageError
from perf.json_form import report_from_document
from perf.llm.measurement import LlmMeasurement, LlmSettings, Wire, measure_llm_level
from perf.metrics import Latency, Spread, spread

LLM_SCHEMA = "modelkiln.perf_report.llm/1"
METRICS = ("ttft", "tpot", "itl", "e2e")


@dataclass(frozen=True)
class LlmSubject:
    """What was measured. `endpoint` is "grpc" or "openai"; `prompts` says what was asked, in words."""

    model: str
    version: str
    endpoint: str
    address: str
    server: str
    prompts: str


@dataclass(frozen=True)
class LlmLevel:
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
    measurements: tuple[LlmMeasurement, ...]

    @property
    def typical(self) -> LlmMeasurement:
        """The measurement of median tokens/s: a real one, so that its figures belong together."""
        ordered = sorted(self.measurements, key=lambda one: one.output_tokens_per_s)
        return ordered[(len(ordered) - 1) // 2]

    def spread_of(self, figure: Callable[[LlmMeasurement], float | None]) -> Spread | None:
        """A figure over the repeats; None where a repeat lacks it."""
        figures = [found for one in self.measurements if (found := figure(one)) is not None]
        return spread(figures) if len(figures) == len(self.measurements) else None

    @property
    def tokens_per_s(self) -> Spread:
        return spread([one.output_tokens_per_s for one in self.measurements])

    @property
    def goodput(self) -> Spread | None:
        """Good requests per second; None without limits."""
        return self.spread_of(lambda one: one.goodput_rps)

    def latency(self, metric: str, percentile: str) -> Spread | None:
        """One percentile of one of `METRICS` over the repeats; None where a repeat has none."""

        def figure(one: LlmMeasurement) -> float | None:
            found: Latency | None = getattr(one, metric)
            return None if found is None else found.percentiles.get(percentile)

        return self.spread_of(figure)


@dataclass(frozen=True)
class LlmReport:
    """Everything that a reader needs to judge the figures, and to take them again."""

    schema: str
    created: str
    command: str
    mode: str
    subject: LlmSubject
    settings: LlmSettings
    environment: Environment
    levels: tuple[LlmLevel, ...]

    @property
    def all_failed(self) -> bool:
        """True when no request of the whole run succeeded."""
        return not any(one.completed for level in self.levels for one in level.measurements)


def measure_llm(
    subject: LlmSubject,
    wire: Wire,
    payloads: Iterator[bytes],
    loads: Sequence[Arrivals],
    settings: LlmSettings,
    *,
    environment: Environment,
    created: str,
    command: str,
    progress: Callable[[int, str], None] | None = None,
) -> LlmReport:
    """Measure every level of `loads`, each `settings.repeats` times, the whole list before it is repeated.

    Args:
        subject: what is measured, for the report.
        wire: how requests travel.
        payloads: one for each request of the whole run, without end.
        loads: levels of one mode.
        settings: how to measure.
        environment: where, for the report.
        created: date and time, ISO 8601.
        command: what reproduces the report.
        progress: is told how many measurements are done, and in a line what happens now.
    """
    say = progress or (lambda done, text: None)
    taken: list[list[LlmMeasurement]] = [[] for _ in loads]
    for repeat in range(settings.repeats):
        for index, load in enumerate(loads):
            suffix = f", repeat {repeat + 1} of {settings.repeats}" if settings.repeats > 1 else ""
            say(repeat * len(loads) + index, f"{load}{suffix}")
            # Other arrivals for each repeat: with the same ones the spread would leave out the chance in them.
            arrivals = replace(load, seed=load.seed + repeat) if isinstance(load, OpenLoop) else load
            taken[index].append(measure_llm_level(wire, payloads, arrivals, settings))
    levels = tuple(
        LlmLevel(str(load), load.level, load.distribution if isinstance(load, OpenLoop) else None, tuple(measured))
        for load, measured in zip(loads, taken, strict=True)
    )
    return LlmReport(LLM_SCHEMA, created, command, loads[0].mode, subject, settings, environment, levels)


def llm_report_from_document(document: Any, source: str) -> LlmReport:
    """A report from its JSON form; raises `UsageError`, naming `source`, when it is none."""
    report: LlmReport = report_from_document(LlmReport, LLM_SCHEMA, document, source)
    if any(len(level.measurements) != report.settings.repeats for level in report.levels):
        raise UsageError(f"{source} is not a whole perf report: a level lacks a repeat")
    return report
