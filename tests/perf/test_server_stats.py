"""Triton's counters, before and after."""

from __future__ import annotations

from typing import Any

import pytest

from perf.server_stats import activity_between, composing_models, parse_counters


def entry(inferences: int, executions: int, batches: dict[int, int], **phases: tuple[int, int]) -> dict[str, Any]:
    return {
        "name": "m",
        "version": "1",
        "inference_count": inferences,
        "execution_count": str(executions),
        "inference_stats": {name: {"count": count, "ns": str(ns)} for name, (count, ns) in phases.items()},
        "batch_stats": [{"batch_size": size, "compute_infer": {"count": n}} for size, n in batches.items()],
    }


def test_c07_the_batches_that_really_happened() -> None:
    before = parse_counters([entry(10, 4, {1: 2, 4: 2}, queue=(10, 1_000_000))])
    after = parse_counters([entry(24, 7, {1: 3, 4: 3, 9: 1}, queue=(24, 15_000_000), compute_infer=(24, 48_000))])
    (activity,) = activity_between(before, after)
    assert (activity.inferences, activity.executions) == (14, 3)
    assert activity.mean_batch == pytest.approx(14 / 3)
    assert activity.batches == {"1": 1, "4": 1, "9": 1}
    assert activity.phase_us == {"queue": 1000.0, "compute_infer": 2.0}  # 14 ms / 14; 48 us / 24


def test_a_model_that_did_nothing_is_left_out() -> None:
    reading = parse_counters([entry(10, 4, {})])
    assert activity_between(reading, reading) == ()


def test_a_model_loaded_in_between_counts_from_zero() -> None:
    reading = parse_counters([entry(10, 4, {1: 4})])
    (new,) = activity_between([], reading)
    assert new.inferences == 10
    (reloaded,) = activity_between(parse_counters([entry(50, 50, {1: 50})]), reading)
    assert (reloaded.inferences, reloaded.batches) == (10, {"1": 4})


def test_grpc_leaves_zeros_out() -> None:
    (counters,) = parse_counters([{"name": "m", "version": "1"}])
    assert (counters.inferences, counters.phase_ns["queue"], counters.batches) == (0, 0, {})


def test_composing_models_of_nested_ensembles_each_once() -> None:
    steps = {"outer": ["inner", "leaf"], "inner": ["leaf", "other"]}

    def config_of(name: str) -> dict[str, Any]:
        return {"ensemble_scheduling": {"step": [{"model_name": step} for step in steps.get(name, [])]}}

    assert composing_models("outer", config_of) == ("outer", "inner", "leaf", "other")
    assert composing_models("leaf", config_of) == ("leaf",)
