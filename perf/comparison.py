"""Two reports side by side: the ratio at each level, and whether chance could explain it."""

from __future__ import annotations

from dataclasses import dataclass

from perf.errors import UsageError
from perf.metrics import Spread
from perf.report import Level, Report


@dataclass(frozen=True)
class Change:
    """One figure at one level in both reports. `ratio` is new / old, None when the old one is 0.

    Attributes:
        overlap: the intervals share a value: no difference is shown. None when there is only one sample each.
    """

    load: str
    figure: str
    old: Spread
    new: Spread
    ratio: float | None
    overlap: bool | None


@dataclass(frozen=True)
class Comparison:
    """All changes, and what keeps the two reports from being quite comparable."""

    changes: tuple[Change, ...]
    differences: tuple[str, ...]


def compare(old: Report, new: Report) -> Comparison:
    """Compare level by level.

    Raises:
        UsageError: one is of a closed, one of an open loop, whose latencies mean different things (h15), or
            they have no level in common.
    """
    if old.mode != new.mode:
        raise UsageError(
            f"cannot compare {_loop(old)} with {_loop(new)}: a closed loop waits for a slow server, "
            "an open loop does not, so their latencies mean different things; measure both in one mode"
        )
    levels = {(level.value, level.distribution): level for level in old.levels}
    pairs = [
        (levels[level.value, level.distribution], level)
        for level in new.levels
        if (level.value, level.distribution) in levels
    ]
    if not pairs:
        raise UsageError(
            f"the reports have no level in common: {', '.join(level.load for level in old.levels)} "
            f"against {', '.join(level.load for level in new.levels)}"
        )
    names = [name for name in old.percentile_names if name in new.percentile_names]
    return Comparison(
        changes=tuple(change for before, after in pairs for change in _changes(before, after, names)),
        differences=tuple(_differences(old, new)),
    )


def _loop(report: Report) -> str:
    return f"{'an' if report.mode == 'open' else 'a'} {report.mode} loop"


def _changes(old: Level, new: Level, names: list[str]) -> list[Change]:
    found = [_change(new.load, "requests/s", old.throughput, new.throughput, _many_windows(old, new))]
    repeated = min(len(old.measurements), len(new.measurements)) > 1
    for name in names:
        before, after = old.latency(name), new.latency(name)
        if before is not None and after is not None:
            found.append(_change(new.load, f"{name} ms", before, after, repeated))
    return found


def _many_windows(old: Level, new: Level) -> bool:
    """True when both throughputs are intervals, over repeats or over windows, and not single figures."""
    return all(len(level.measurements) > 1 or len(level.typical.windows) > 1 for level in (old, new))


def _change(load: str, figure: str, old: Spread, new: Spread, intervals: bool) -> Change:
    return Change(
        load=load,
        figure=figure,
        old=old,
        new=new,
        ratio=new.median / old.median if old.median else None,
        overlap=old.overlaps(new) if intervals else None,
    )


def _differences(old: Report, new: Report) -> list[str]:
    """What else differs between the two: the reader decides whether that is the point."""
    pairs = [
        ("model", old.subject.model, new.subject.model),
        ("model version", old.subject.version, new.subject.version),
        ("protocol", old.subject.protocol, new.subject.protocol),
        ("batch size", old.subject.batch_size, new.subject.batch_size),
        ("workload", old.subject.workload, new.subject.workload),
        ("server", old.subject.server, new.subject.server),
        ("host", old.environment.host, new.environment.host),
        ("CPU", old.environment.cpu, new.environment.cpu),
        ("cores", old.environment.cores, new.environment.cores),
        ("client on the server's host", old.environment.same_host, new.environment.same_host),
    ]
    return [f"{name}: {before} -> {after}" for name, before, after in pairs if before != after]
