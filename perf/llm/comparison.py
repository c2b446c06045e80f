"""Two reports on language models side by side."""

from __future__ import annotations

from perf.comparison import (
    Change,
    Comparison,
    change_of,
    differing,
    differing_failures,
    differing_limits,
    differing_machines,
    pair_levels,
)
from perf.llm.report import METRICS, LlmLevel, LlmReport

_PERCENTILES = ("p50", "p99")


def compare_llm(old: LlmReport, new: LlmReport) -> Comparison:
    """Compare level by level.

    Raises:
        UsageError: as `pair_levels`.
    """
    pairs = pair_levels(old.mode, old.levels, new.mode, new.levels)
    subjects = [
        (name.replace("_", " "), getattr(old.subject, name), getattr(new.subject, name))
        for name in ("model", "version", "endpoint", "server", "prompts")
    ]
    return Comparison(
        changes=tuple(change for before, after in pairs for change in _changes(before, after)),
        differences=tuple(
            differing_failures(pairs)
            + differing([*subjects, ("streamed", old.settings.streamed, new.settings.streamed)])
            + differing_limits(old.settings.goodput_limits_ms, new.settings.goodput_limits_ms)
            + differing_machines(old.environment, new.environment)
        ),
    )


def _changes(old: LlmLevel, new: LlmLevel) -> list[Change]:
    repeated = min(len(old.measurements), len(new.measurements)) > 1
    found = [change_of(new.load, "output tokens/s", old.tokens_per_s, new.tokens_per_s, repeated)]
    if old.goodput is not None and new.goodput is not None:
        found.append(change_of(new.load, "good/s", old.goodput, new.goodput, repeated))
    for metric in METRICS:
        for name in _PERCENTILES:
            before, after = old.latency(metric, name), new.latency(metric, name)
            if before is not None and after is not None:
                found.append(change_of(new.load, f"{metric.upper()} {name} ms", before, after, repeated))
    return found
