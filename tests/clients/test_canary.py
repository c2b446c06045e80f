"""Which version a request goes to."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from clients import InputError, VersionSplit


def test_shares_are_kept() -> None:
    split = VersionSplit({"1": 90, "2": 10})
    counts = Counter(split.choose() for _ in range(10_000))
    # Four standard deviations of a binomial distribution: 4 * sqrt(10000 * 0.9 * 0.1) = 120.
    assert set(counts) == {"1", "2"} and abs(counts["2"] - 1000) <= 120


def test_a_seed_gives_the_same_choices_and_another_one_others() -> None:
    def choices(seed: int) -> list[str]:
        split = VersionSplit({"1": 1, "2": 1}, seed)
        return [split.choose() for _ in range(100)]

    assert choices(1) == choices(1) != choices(2)
    # Pinned: another process, another year.
    assert "".join(choices(0)[:12]) == "111211221222"


def test_a_key_keeps_its_version_and_a_growing_canary_loses_none() -> None:
    keys = [f"user {index}" for index in range(2000)]
    small, large = VersionSplit({"1": 95, "2": 5}), VersionSplit({"2": 40, "1": 60})
    assert [small.choose(key) for key in keys] == [small.choose(key) for key in keys]
    canaries = {key for key in keys if small.choose(key) == "2"}
    assert canaries and canaries < {key for key in keys if large.choose(key) == "2"}


def test_versions_are_in_the_order_of_their_numbers() -> None:
    assert list(VersionSplit({"10": 1, "9": 1}).weights) == ["9", "10"]


def test_a_version_without_a_share_gets_nothing() -> None:
    split = VersionSplit({"1": 0, "2": 1.5, "3": 0})
    assert {split.choose() for _ in range(100)} == {"2"}


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ({}, "leave no version"),
        ({"1": 0}, "leave no version"),
        ({"1": -1}, "weight of version 1 is -1"),
        ({"1": float("nan")}, "number of 0 or more"),
        ({"1": float("inf")}, "number of 0 or more"),
        ({"1": "2"}, "number of 0 or more"),
        ({1: 1.0}, "versions are numbers as text"),
        ({"latest": 1.0}, "versions are numbers as text"),
        ({"": 1.0}, "versions are numbers as text"),
    ],
)
def test_what_makes_no_sense_is_refused(weights: dict[Any, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        VersionSplit(weights)
