"""The search for nodes to hold: what it finds, how often it asks, and what it may claim. The judge is arithmetic."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compiler.precision.search import SearchResult
from compiler.precision.search import find_holds as search


def judge_of(losses: dict[str, float]):
    """Returns a judge by which the losses of the nodes that are not held add up."""

    def judge(held: frozenset[str]) -> float:
        return 1 - sum(loss for name, loss in losses.items() if name not in held)

    return judge


def find_holds(judge, *args, **options) -> SearchResult:
    return search(judge, judge, *args, **options)


def names(count: int) -> list[str]:
    return [f"n{i}" for i in range(count)]


def test_nothing_is_held_where_nothing_must_be_and_one_run_says_so():
    found = find_holds(judge_of(dict.fromkeys(names(9), 0.0001)), names(9), 0.99, 50)
    assert (found.held, found.runs, found.reached, found.minimal) == ((), 1, True, True)
    assert found.note() == "no node had to be held for accuracy"


def test_the_nodes_that_lose_most_are_held_and_no_more():
    losses = {**dict.fromkeys(names(36), 0.0001), "n7": 0.05, "n20": 0.02, "n33": 0.006}
    found = find_holds(judge_of(losses), names(36), 0.99, 96)
    assert found.held == ("n7", "n20") and found.reached and found.minimal
    assert found.score == pytest.approx(1 - 0.006 - 33 * 0.0001)
    # Once for nothing held, once for each node alone, and a few for the prefix and for the releases.
    assert found.runs <= 1 + 36 + 6
    assert found.losses["n7"] == pytest.approx(0.05)
    assert "each was tried released" in found.note()


@pytest.mark.parametrize("count", [100, 1000])
def test_few_sensitive_nodes_among_many_are_found_by_halving(count):
    losses = {**dict.fromkeys(names(count), 1e-7), "n13": 0.05, "n71": 0.02}
    found = find_holds(judge_of(losses), names(count), 0.99, 96)
    assert set(found.held) == {"n13", "n71"} and found.minimal and found.runs < 60


def test_what_a_prefix_holds_needlessly_is_released():
    """`b` loses most alone and nothing beside `a`: a set that only looks at single nodes would hold both."""

    def judge(held: frozenset[str]) -> float:
        return 1.0 if "a" in held else 0.5 if "b" not in held else 0.6

    def measured(held: frozenset[str]) -> float:
        return {frozenset("bc"): 0.8, frozenset("ac"): 0.7}.get(held, judge(held))

    found = find_holds(measured, ["a", "b", "c"], 0.99, 96)
    assert found.held == ("a",) and found.minimal and found.score == 1.0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 0.02), min_size=1, max_size=9), st.integers(1, 40), st.booleans())
def test_a_claim_of_minimality_is_true_and_the_budget_is_kept(values, max_runs, keep_one):
    losses = dict(zip(names(len(values)), values, strict=True))
    judge = judge_of(losses)
    asked: list[frozenset[str]] = []

    def counted(held: frozenset[str]) -> float:
        asked.append(held)
        return judge(held)

    found = find_holds(counted, list(losses), 0.99, max_runs, keep_one=keep_one)
    assert found.runs == len(asked) <= max_runs
    assert found.score == judge(frozenset(found.held)) and found.reached == (found.score >= 0.99)
    assert not keep_one or len(found.held) < len(losses)
    if found.minimal:
        for size in range(len(found.held)):
            assert all(judge(frozenset(kept)) < 0.99 for kept in combinations(found.held, size))


def test_a_spent_budget_is_said_and_a_bad_result_is_not_called_reached():
    losses = dict.fromkeys(names(8), 0.01)
    found = find_holds(judge_of(losses), names(8), 0.99, 12)
    assert found.reached and not found.minimal
    assert "the budget of 12 graphs was spent" in found.note()
    assert not find_holds(lambda held: 0.0, names(8), 0.99, 8).reached
    # The last run goes to the largest set: a result at any cost before a refusal.
    assert len(find_holds(lambda held: 1.0 if len(held) == 8 else 0.0, names(8), 0.99, 8).held) == 8
