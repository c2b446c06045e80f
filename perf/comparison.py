"""Two reports side by side: the ratio at each level, and whether chance could explain it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from perf.environment import Environment
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


class AnyMeasurement(Protocol):
    """How many requests of a measurement came to what, in either kind of report."""

    @property
    def completed(self) -> int: ...

    @property
    def failed(self) -> int: ...


class AnyLevel(Protocol):
    """A level of either kind of report."""

    @property
    def measurements(self) -> Sequence[AnyMeasurement]: ...

    @property
    def load(self) -> str: ...

    @property
    def value(self) -> float: ...

    @property
    def distribution(self) -> str | None: ...


L = TypeVar("L", bound=AnyLevel)


def compare(old: Report, new: Report) -> Comparison:
    """Compare level by level.

    Raises:
        UsageError: as `pair_levels`.
    """
    pairs = pair_levels(old.mode, old.levels, new.mode, new.levels)
    names = [name for name in old.percentile_names if name in new.percentile_names]
    return Comparison(
        changes=tuple(change for before, after in pairs for change in _changes(before, after, names)),
        differences=tuple(differing_failures(pairs) + _differences(old, new)),
    )


def pair_levels(old_mode: str, old: Sequence[L], new_mode: str, new: Sequence[L]) -> list[tuple[L, L]]:
    """The levels that both reports have.

    Raises:
        UsageError: one is of a closed, one of an open loop, whose latencies mean different things (h15), or
            they have no level in common.
    """
    if old_mode != new_mode:
        raise UsageError(
            f"cannot compare {_loop(old_mode)} with {_loop(new_mode)}: a closed loop waits for a slow server, "
            "an open loop does not, so their latencies mean different things; measure both in one mode"
        )
    levels = {(level.value, level.distribution): level for level in old}
    pairs = [
        (levels[level.value, level.distribution], level) for level in new if (level.value, level.distribution) in levels
    ]
    if not pairs:
        raise UsageError(
            f"the reports have no level in common: {', '.join(level.load for level in old)} "
            f"against {', '.join(level.load for level in new)}"
        )
    return pairs


def _loop(mode: str) -> str:
    return f"{'an' if mode == 'open' else 'a'} {mode} loop"


def _changes(old: Level, new: Level, names: list[str]) -> list[Change]:
    found = [change_of(new.load, "requests/s", old.throughput, new.throughput, _many_windows(old, new))]
    repeated = min(len(old.measurements), len(new.measurements)) > 1
    for name in names:
        before, after = old.latency(name), new.latency(name)
        if before is not None and after is not None:
            found.append(change_of(new.load, f"{name} ms", before, after, repeated))
    return found


def _many_windows(old: Level, new: Level) -> bool:
    """True when both throughputs are intervals, over repeats or over windows, and not single figures."""
    return all(len(level.measurements) > 1 or len(level.typical.windows) > 1 for level in (old, new))


def change_of(load: str, figure: str, old: Spread, new: Spread, intervals: bool) -> Change:
    """The change of one figure; `intervals`: both are over several samples and not single figures."""
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
    ]
    limits = differing_limits(old.settings.goodput_limits_ms, new.settings.goodput_limits_ms)
    return differing(pairs) + limits + differing_machines(old.environment, new.environment)


def differing_failures(pairs: Sequence[tuple[AnyLevel, AnyLevel]]) -> list[str]:
    """Levels at which requests failed: latencies are of those that did not, and a server that refuses looks fast."""
    return [
        f"failed requests at {new.load}: {_failures(old)} -> {_failures(new)}"
        for old, new in pairs
        if any(one.failed for level in (old, new) for one in level.measurements)
    ]


def _failures(level: AnyLevel) -> str:
    failed = sum(one.failed for one in level.measurements)
    return f"{failed} of {failed + sum(one.completed for one in level.measurements)}"


def differing_limits(old: Mapping[str, float], new: Mapping[str, float]) -> list[str]:
    """Good requests under other limits are not the same thing; a report without limits has none."""
    return differing([("goodput limits", _in_words(old), _in_words(new))]) if old and new else []


def _in_words(limits_ms: Mapping[str, float]) -> str:
    return ", ".join(f"{name} <= {limit:g} ms" for name, limit in sorted(limits_ms.items()))


def differing_machines(old: Environment, new: Environment) -> list[str]:
    """How the machines of two reports differ."""
    pairs = [
        ("host", old.host, new.host),
        ("CPU", old.cpu, new.cpu),
        ("cores", old.cores, new.cores),
        ("client on the server's host", old.same_host, new.same_host),
    ]
    return differing(pairs)


def differing(pairs: Sequence[tuple[str, object, object]]) -> list[str]:
    """A line for each (name, before, after) whose two values differ."""
    return [f"{name}: {before} -> {after}" for name, before, after in pairs if before != after]
