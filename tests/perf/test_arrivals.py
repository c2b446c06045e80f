"""Ranges and the statistics of arrivals."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perf.arrivals import ClosedLoop, OpenLoop, parse_range
from perf.errors import UsageError


@pytest.mark.parametrize(
    ("text", "levels"),
    [
        ("8", (8,)),
        ("1:4", (1, 2, 3, 4)),
        ("1:8:3", (1, 4, 7)),
        ("1:16:x4", (1, 4, 16)),
        ("1:15:x4", (1, 4)),
        ("5:5:2", (5,)),
        ("1,8,32", (1, 8, 32)),
        ("1:2,8:16:x2", (1, 2, 8, 16)),
    ],
)
def test_range_of_whole_levels(text: str, levels: tuple[int, ...]) -> None:
    assert parse_range(text, whole=True) == levels


def test_range_of_fractions_hits_its_end() -> None:
    assert parse_range("0.1:0.3:0.1", whole=False) == pytest.approx((0.1, 0.2, 0.3))
    assert parse_range("0.5:2:x2", whole=False) == (0.5, 1, 2)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1,",
        "1,2,1",
        "a",
        "1:2:3:4",
        "4:1",
        "0:4",
        "-1",
        "1:4:0",
        "1:4:x1",
        "1:4:-1",
        "1:8:x0.5",
        "1:4:0.5",
        "nan",
        "1:inf",
        "1:9999",
    ],
)
def test_bad_range_is_refused_and_shown(text: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse_range(text, whole=True)
    assert repr(text) in str(raised.value)


@given(start=st.integers(1, 50), span=st.integers(0, 50), step=st.integers(1, 60))
def test_range_is_that_of_python(start: int, span: int, step: int) -> None:
    end = start + span
    assert parse_range(f"{start}:{end}:{step}", whole=True) == tuple(range(start, end + 1, step))


def test_constant_gaps() -> None:
    arrivals = OpenLoop(4.0)
    assert list(islice(arrivals.gaps_s(), 3)) == [0.25, 0.25, 0.25]
    assert arrivals.coefficient_of_variation == 0


def test_h19_gamma_arrivals_have_the_mean_and_the_burstiness_asked_for() -> None:
    arrivals = OpenLoop(10.0, "gamma", burstiness=0.25, seed=1)
    assert arrivals.coefficient_of_variation == 2.0
    gaps = np.array(list(islice(arrivals.gaps_s(), 200_000)))
    assert gaps.mean() == pytest.approx(0.1, rel=0.02)
    assert gaps.std() / gaps.mean() == pytest.approx(2.0, rel=0.02)


def test_h19_poisson_is_gamma_of_burstiness_one() -> None:
    poisson = list(islice(OpenLoop(10.0, "poisson", seed=3).gaps_s(), 2000))
    assert poisson == list(islice(OpenLoop(10.0, "gamma", 1.0, seed=3).gaps_s(), 2000))
    assert np.mean(poisson) == pytest.approx(0.1, rel=0.05)
    assert np.std(poisson) == pytest.approx(0.1, rel=0.1)


def test_the_seed_decides() -> None:
    def gaps(seed: int) -> list[float]:
        return list(islice(OpenLoop(5.0, "poisson", seed=seed).gaps_s(), 5))

    assert gaps(7) == gaps(7)
    assert gaps(7) != gaps(8)


def test_loads_name_themselves_and_refuse_nonsense() -> None:
    assert str(ClosedLoop(4)) == "concurrency 4"
    assert str(OpenLoop(12.5, "poisson")) == "12.5 requests/s, poisson"
    for wrong in (
        lambda: ClosedLoop(0),
        lambda: OpenLoop(0),
        lambda: OpenLoop(1, "pareto"),
        lambda: OpenLoop(1, "gamma", 0),
    ):
        with pytest.raises(UsageError):
            wrong()
