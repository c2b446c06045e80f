"""Triton's counters, before and after."""

from __future__ import annotations

from typing import Any

import pytest

from perf.server_stats import CounterReader, Counters, activity_between, calls_per_request, parse_counters


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


def test_how_often_a_request_calls_each_model_of_nested_ensembles() -> None:
    steps = {"outer": ["inner", "leaf", "inner"], "inner": ["leaf", "other"]}

    def config_of(name: str) -> dict[str, Any]:
        return {"ensemble_scheduling": {"step": [{"model_name": step} for step in steps.get(name, [])]}}

    assert calls_per_request("outer", config_of) == {"outer": 1, "inner": 2, "leaf": 3, "other": 2}
    assert calls_per_request("leaf", config_of) == {"leaf": 1}


def settled(*readings: list[dict[str, Any]], completed: int, calls: int = 1) -> tuple[list[Counters], int]:
    """The reading that `settled` takes of those given, and how many are left."""
    left = [parse_counters(reading) for reading in readings]
    reader = CounterReader(read=lambda: left.pop(0), calls={"m": calls})
    return reader.settled(reader.read(), completed), len(left)


def test_c07_a_reading_is_taken_again_until_it_holds_the_last_request_and_its_batch() -> None:
    before = [entry(8, 1, {8: 1}, success=(1, 0))]
    without_request = [entry(16, 2, {8: 2}, success=(2, 0))]
    without_batch = [entry(24, 3, {8: 2}, success=(3, 0))]
    whole = [entry(24, 3, {8: 3}, success=(3, 0))]
    got, left = settled(before, without_request, without_batch, whole, whole, completed=2)
    assert (got, left) == (parse_counters(whole), 1)


def test_c07_a_model_that_each_request_calls_twice_is_waited_for() -> None:
    readings = [[entry(n, n, {1: n}, success=(n, 0))] for n in range(6)]
    got, left = settled(*readings, completed=2, calls=2)
    assert (got[0].inferences, left) == (4, 1)


def test_a_server_without_counters_is_not_waited_for() -> None:
    assert settled([], [], completed=5) == ([], 0)


def test_answers_of_the_cache_have_no_batch() -> None:
    hit = [
        {**entry(3, 1, {1: 1}, success=(3, 0)), "inference_stats": {"success": {"count": 3}, "cache_hit": {"count": 2}}}
    ]
    assert settled([entry(0, 0, {})], hit, completed=3) == (parse_counters(hit), 0)
