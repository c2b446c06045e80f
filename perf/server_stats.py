"""What the server did during a measurement: Triton's counters after, minus before.

An ensemble's own counters are sums over its steps (d08); the wall time is the client's latency.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Json = Mapping[str, Any]
PYTHON = "python"  # the backend whose models may call others
PHASES = ("queue", "compute_input", "compute_infer", "compute_output")
_SETTLED_WITHIN_S = 2.0
_POLL_S = 0.005


@dataclass(frozen=True)
class Counters:
    """Triton's cumulative counters of one version of one model. Times in nanoseconds."""

    model: str
    version: str
    successes: int
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
            successes=_number(entry, "success", "count"),
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


def calls_per_request(model: str, config_of: Callable[[str], Json]) -> dict[str, int]:
    """How often one request to `model` calls each model: itself once, and of an ensemble, nested or not, its steps."""
    calls: Counter[str] = Counter()

    def add(name: str) -> None:
        calls[name] += 1
        for step in ensemble_steps(config_of(name)):
            add(step)

    add(model)
    return dict(calls)


def ensemble_steps(config: Json) -> list[str]:
    """Names of the models that an ensemble's steps call; empty for any other model."""
    return [step["model_name"] for step in config.get("ensemble_scheduling", {}).get("step", ())]


@dataclass(frozen=True)
class CounterReader:
    """Reads the counters of a server.

    Attributes:
        read: the counters as they are now; empty where the server gives none.
        calls: model -> how often one request calls it.
    """

    read: Callable[[], list[Counters]]
    calls: Mapping[str, int]

    def settled(self, before: Sequence[Counters], completed: int) -> list[Counters]:
        """The counters once they hold all that was answered. Blocks for two seconds at most.

        Triton counts a request after its answer has left, and the batch after its requests, so that a reading right
        after the last answer may lack both.

        Args:
            before: an earlier reading.
            completed: requests that were answered since then.
        """
        deadline = time.monotonic() + _SETTLED_WITHIN_S
        while (now := self.read()) and not self._holds_all(before, now, completed) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return now

    def _holds_all(self, before: Sequence[Counters], now: Sequence[Counters], completed: int) -> bool:
        if any(_successes(now, m) - _successes(before, m) < n * completed for m, n in self.calls.items()):
            return False
        since = activity_between(before, now)
        return all(_batched(one) >= one.inferences - one.cache_hits for one in since if one.batches)


def _successes(reading: Sequence[Counters], model: str) -> int:
    return sum(counters.successes for counters in reading if counters.model == model)


def _batched(activity: ModelActivity) -> int:
    return sum(int(size) * count for size, count in activity.batches.items())


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
    return Counters(like.model, like.version, 0, 0, 0, 0, 0, none, none, {})


def _number(entry: Json, group: str, key: str) -> int:
    return int(entry.get("inference_stats", {}).get(group, {}).get(key, 0))
