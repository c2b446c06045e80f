from __future__ import annotations

import numpy as np
import pytest

from compiler.cases import Case
from compiler.spec import Tolerance
from compiler.verify import ParityReport, compare, failure_text, verify

LIMITS = Tolerance(atol=1e-5, rtol=1e-4, cosine=0.99999)


def _compare(want, got, limits=LIMITS):
    return compare("case", "y", np.asarray(want), np.asarray(got), limits)


def test_b23_zero_in_the_reference_is_no_division_by_zero():
    result = _compare([0.0, 1.0], [1e-8, 1.0])
    assert result.passed and result.max_abs == pytest.approx(1e-8) and result.max_rel == 0.0


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_b23_nan_and_infinity_fail(bad):
    result = _compare([1.0, 1.0], [1.0, bad])
    assert not result.passed and result.problem == "1 NaN or infinite values"


def test_an_element_out_of_tolerance_is_counted():
    result = _compare([1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 4.1])
    assert result.outliers == 0.25 and "25.00%" in result.problem
    assert result.max_abs == pytest.approx(0.1) and result.max_rel == pytest.approx(0.025)


def test_the_tolerance_is_atol_plus_rtol_times_want():
    limits = Tolerance(atol=0.5, rtol=0.1, cosine=-1)
    assert _compare([10.0], [11.5], limits).passed
    assert not _compare([10.0], [11.6], limits).passed


def test_cosine_is_judged_by_the_worst_row():
    # Inside atol everywhere, yet the second row points elsewhere: 1 / sqrt(1 + 0.45**2) = 0.91192.
    limits = Tolerance(atol=0.5, rtol=0, cosine=0.95)
    result = _compare([[1.0, 0.0], [1.0, 0.0]], [[1.0, 0.0], [1.0, 0.45]], limits)
    assert result.outliers == 0
    assert result.cosine == pytest.approx(0.91192, abs=1e-5)
    assert "is below 0.95" in result.problem


def test_a_row_of_zeros_has_no_direction():
    assert _compare([[0.0, 0.0]], [[1e-9, -1e-9]]).passed


def test_integers_must_be_equal():
    assert _compare(np.array([1, 2]), np.array([1, 2])).passed
    assert _compare(np.array([1, 2]), np.array([1, 3])).problem == "50.00% of the elements differ"


def test_shape_and_dtype_must_be_equal():
    assert "shape [1, 2]" in _compare([1.0, 2.0], [[1.0, 2.0]]).problem
    assert "dtype float32" in _compare(np.array([1.0]), np.array([1.0], dtype=np.float32)).problem


def test_a_failure_is_told_by_its_worst_case_and_the_limits():
    report = ParityReport((_compare([1.0], [2.0]),), LIMITS)
    text = failure_text(report, "this target rounds")
    assert "1 of 1 comparisons failed. Worst: case, output 'y'" in text and "max abs 1," in text
    assert text.endswith(
        "allowed: atol 1e-05, rtol 0.0001, cosine 0.99999 (tolerance in the spec); note that this target rounds"
    )
    assert failure_text(ParityReport((_compare([1.0], [1.0]),), LIMITS)) == ""


def test_without_atol_only_the_direction_is_judged():
    limits = Tolerance(atol=None, rtol=0, cosine=0.99)
    assert _compare([1.0, 2.0], [1.1, 2.2], limits).passed
    assert not _compare([1.0, 2.0], [2.0, 1.0], limits).passed
    assert not _compare([1.0, 2.0], [1.0, np.nan], limits).passed


def test_verify_fails_on_a_seeded_wrong_output():
    """The comparison itself is tested: a runner that is wrong in one element of one case is caught."""
    x = np.ones((2, 3), dtype=np.float32)
    cases = [Case("a", {}, {"x": x}), Case("b", {}, {"x": x})]
    references = {"a": {"y": x}, "b": {"y": x}}
    assert not verify(lambda inputs: {"y": inputs["x"].copy()}, cases, references, LIMITS).failures
    calls = []

    def wrong_once(inputs):
        y = inputs["x"].copy()
        calls.append(1)
        if len(calls) == 2:
            y[1, 2] += 1e-3
        return {"y": y}

    assert [c.case for c in verify(wrong_once, cases, references, LIMITS).failures] == ["b"]


LOW = Tolerance(atol=None, rtol=0.0, cosine=0.99)


def test_zeros_where_the_model_gives_a_direction_fail_without_an_absolute_tolerance():
    want = np.array([[3.0, 4.0], [1.0, 2.0]])
    assert compare("c", "y", want, np.array([[3.0, 4.0], [0.0, 0.0]]), LOW).problem == "cosine 0.000000 is below 0.99"
    assert compare("c", "y", want, np.zeros_like(want), LOW).cosine == 0.0


def test_a_row_of_zeros_must_stay_small_beside_the_others():
    want = np.array([[3.0, 4.0], [0.0, 0.0]])
    assert compare("c", "y", want, np.array([[3.0, 4.0], [0.03, 0.0]]), LOW).passed  # 0.6% of the longest row
    assert not compare("c", "y", want, np.array([[3.0, 4.0], [0.3, 0.0]]), LOW).passed
    # All zeros have no scale to judge by.
    assert compare("c", "y", np.zeros((1, 2)), np.full((1, 2), 1e-3), LOW).passed


def test_a_row_that_is_nearly_exact_is_not_asked_for_its_direction():
    """A heat map's background: 1e-6 everywhere, off by less than atol; its cosine would say nothing."""
    rng = np.random.default_rng(0)
    background = rng.uniform(0, 4e-6, (3, 96)).astype(np.float32)
    rows = np.concatenate([background, np.full((1, 96), 0.5, np.float32)])
    noise = rng.uniform(-2e-7, 2e-7, rows.shape).astype(np.float32)
    assert _compare(rows, rows + noise).passed
    # Lower precisions are judged by direction alone, and a longer row always is.
    assert not _compare(rows, rows + noise, Tolerance(atol=None, rtol=0.0, cosine=0.99999)).passed
    tilted = rows.copy()
    tilted[3] *= np.linspace(0.98, 1.02, 96, dtype=np.float32)
    assert "cosine" in _compare(rows, tilted, Tolerance(atol=1e-5, rtol=0.05, cosine=0.99999)).problem
