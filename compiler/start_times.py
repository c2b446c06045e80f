"""How long each model took from the server's start to READY, by phase, and whether that is within its budget. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from compiler.server_log import ServerLog
from compiler.units import ms_from_text

SERVER, OTHER = "server", "other"
# What backends report (backends/phases.py), in order; `server` comes before and `other` after.
_ORDER = (SERVER, "process", "load", "compile", "warm_up")


@dataclass(frozen=True)
class ModelStart:
    """One model's way to READY.

    Attributes:
        seconds: from the start of the server's process.
        phases: seconds by name; `server` is the time before it began with this model, `other` what nobody reports.
        ready_within_s: the budget, or None.
    """

    model: str
    seconds: float
    phases: Mapping[str, float]
    ready_within_s: float | None

    @property
    def late(self) -> bool:
        return self.ready_within_s is not None and self.seconds > self.ready_within_s

    def to_json(self) -> dict[str, Any]:
        phases = {name: round(seconds, 3) for name, seconds in self.phases.items()}
        found: dict[str, Any] = {"seconds": round(self.seconds, 3), "phases": phases}
        if self.ready_within_s is not None:
            found |= {"ready_within_s": self.ready_within_s, "late": self.late}
        return found

    def __str__(self) -> str:
        phases = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.phases.items())
        return (
            f"model '{self.model}' was READY {self.seconds:.1f} s after the server's start ({phases}); "
            f"its budget is {self.ready_within_s:g} s"
        )


def model_starts(log: ServerLog, budgets_s: Mapping[str, float]) -> list[ModelStart]:
    """Returns the starts of all loaded models, by name.

    Args:
        log: of a server that is READY.
        budgets_s: the models that have one.
    """
    starts = []
    for model in sorted(log.loaded):
        begun, ready = log.loading_at_s.get(model, 0.0), log.loaded_at_s[model]
        reported = dict(log.phases.get(model, {}))
        known = {SERVER: begun, **{name: reported.pop(name) for name in _ORDER if name in reported}, **reported}
        rest = max(ready - sum(known.values()), 0.0)
        starts.append(ModelStart(model, ready, {**known, OTHER: rest}, budgets_s.get(model)))
    return starts


def budgets_s(manifests: Mapping[str, Mapping[str, Any]], for_all_s: float | None) -> dict[str, float]:
    """Returns the models' budgets: the spec's `serving.ready_within`, and one for all; the smaller one counts.

    Args:
        manifests: of the versions that are served; hand-written models have an empty one.
    """
    found = {}
    for model, manifest in manifests.items():
        spec = manifest.get("spec")
        serving = spec.get("serving") if isinstance(spec, dict) else None
        own_ms = ms_from_text(str(serving.get("ready_within"))) if isinstance(serving, dict) else None
        limits = [limit for limit in (own_ms / 1000 if own_ms else None, for_all_s) if limit is not None]
        if limits:
            found[model] = min(limits)
    return found


def start_table(starts: Sequence[ModelStart]) -> list[str]:
    """Returns the lines of a table for a person, in seconds."""
    names = [name for name in _ORDER if any(name in start.phases for start in starts)]
    names += [*sorted({name for start in starts for name in start.phases} - {*_ORDER, OTHER}), OTHER]
    budget = any(start.ready_within_s is not None for start in starts)
    rows = [["model", "READY after", *names, *(["budget"] if budget else [])]]
    for start in starts:
        cells = [f"{start.phases[name]:.1f}" if name in start.phases else "" for name in names]
        limit = "" if start.ready_within_s is None else f"{start.ready_within_s:g} s{' missed' if start.late else ''}"
        rows.append([start.model, f"{start.seconds:.1f} s", *cells, *([limit] if budget else [])])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for name, *cells in rows:
        lines.append("  ".join([name.ljust(widths[0]), *map(str.rjust, cells, widths[1:])]))
    return lines
