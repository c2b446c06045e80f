"""What the server did during a measurement: Triton's counters after, minus before.

An ensemble's own counters are sums over its steps (d08); the wall time is the client's latency.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Json = Mapping[str, Any]
PYTHON = "python"  # the backend whose models may call others
PHASES = ("queue", "compute_input", "compute_infer", "compute_output")


@dataclass(frozen=True)
class Counters:
    """Triton's cumulative counters of one version of one model. Times in nanoseconds."""

    model: str
    version: str
    executions: int
    inferences: int
    failures: int
    cache_hits: int
    phase_count: dict[str, int]
    phase_ns: dict[str, int]
    batches: dict[int, int]  # batch size -> executions of that size


@dataclass(frozen=True)
class ModelActivity:
    """What one model did between two readings.

    Attributes:
        mean_batch: inferences / executions; None when nothing was executed.
        batches: batch size -> executions of that size, as they really happened.
        phase_us: each of `PHASES` -> mean microseconds per request; a phase without requests is absent. Every
            request of a batch is charged the whole batch's time.
        is_ensemble: the phases are sums over the steps, which may run at the same time.
    """

    model: str
    version: str
    is_ensemble: bool
    executions: int
    inferences: int
    failures: int
    cache_hits: int
    mean_batch: float | None
    batches: dict[str, int]
    phase_us: dict[str, float]


def parse_counters(entries: Sequence[Json]) -> list[Counters]:
    """Counters from `model_stats` of the statistics answer; gRPC's JSON leaves zeros out and has strings."""
    return [
        Counters(
            model=entry["name"],
            version=str(entry["version"]),
            executions=int(entry.get("execution_count", 0)),
            inferences=int(entry.get("inference_count", 0)),
            failures=_number(entry, "fail", "count"),
            cache_hits=_number(entry, "cache_hit", "count"),
            phase_count={phase: _number(entry, phase, "count") for phase in PHASES},
            phase_ns={phase: _number(entry, phase, "ns") for phase in PHASES},
            batches={
                int(batch["batch_size"]): int(batch.get("compute_infer", {}).get("count", 0))
                for batch in entry.get("batch_stats", ())
            },
        )
        for entry in entries
    ]


def composing_models(model: str, config_of: Callable[[str], Json]) -> tuple[str, ...]:
    """`model`, and when it is an ensemble all models of its graph, nested ensembles included, each once."""
    found: list[str] = []
    waiting = [model]
    while waiting:
        name = waiting.pop(0)
        if name in found:
            continue
        found.append(name)
        waiting += ensemble_steps(config_of(name))
    return tuple(found)


def ensemble_steps(config: Json) -> list[str]:
    """Names of the models that an ensemble's steps call; empty for any other model."""
    return [step["model_name"] for step in config.get("ensemble_scheduling", {}).get("step", ())]


def activity_between(
    before: Sequence[Counters], after: Sequence[Counters], ensembles: frozenset[str] = frozenset()
) -> tuple[ModelActivity, ...]:
    """What each model did from one reading to the next; versions that did nothing are left out."""
    earlier = {(counters.model, counters.version): counters for counters in before}
    activities = (_difference(earlier.get((now.model, now.version)), now, now.model in ensembles) for now in after)
    return tuple(one for one in activities if one.inferences or one.executions or one.failures)


def _difference(before: Counters | None, after: Counters, is_ensemble: bool) -> ModelActivity:
    # A model that was loaded in between starts its counters from zero.
    if before is None or before.inferences > after.inferences:
        before = _zero(after)
    executions = after.executions - before.executions
    inferences = after.inferences - before.inferences
    counts = {phase: after.phase_count[phase] - before.phase_count[phase] for phase in PHASES}
    batches = {size: count - before.batches.get(size, 0) for size, count in sorted(after.batches.items())}
    return ModelActivity(
        model=after.model,
        version=after.version,
        is_ensemble=is_ensemble,
        executions=executions,
        inferences=inferences,
        failures=after.failures - before.failures,
        cache_hits=after.cache_hits - before.cache_hits,
        mean_batch=inferences / executions if executions else None,
        batches={str(size): count for size, count in batches.items() if count},
        phase_us={
            phase: (after.phase_ns[phase] - before.phase_ns[phase]) / counts[phase] / 1e3
            for phase in PHASES
            if counts[phase]
        },
    )


def _zero(like: Counters) -> Counters:
    none = dict.fromkeys(PHASES, 0)
    return Counters(like.model, like.version, 0, 0, 0, 0, none, none, {})


def _number(entry: Json, group: str, key: str) -> int:
    return int(entry.get("inference_stats", {}).get(group, {}).get(key, 0))
