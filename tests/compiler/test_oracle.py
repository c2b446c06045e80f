from __future__ import annotations

import numpy as np
import pytest

from compiler.cases import Case, make_case
from compiler.errors import ModelRefused
from compiler.oracle import check_repeatable, check_rows
from compiler.spec import model_spec_from_file
from tests.compiler.conftest import SPEC

X = np.random.default_rng(0).standard_normal((4, 16)).astype(np.float32)
CASE = Case("c", {"batch": 4}, {"x": X})


@pytest.fixture
def spec(tmp_path):
    (tmp_path / "s.yaml").write_text(SPEC.replace("FACTORY", "a:b"))
    return model_spec_from_file(tmp_path / "s.yaml")


def test_equal_answers_and_other_roundings_are_one_model():
    check_repeatable(CASE, {"y": X}, {"y": X + np.float32(1e-6)}, ("steps",))


@pytest.mark.parametrize(
    ("first", "again"),
    [(X, X + 0.2), (X, X[:3]), (np.arange(10), np.arange(10) * 2), (np.zeros(4, np.float32), np.ones(4, np.float32))],
)
def test_another_answer_is_refused(first, again):
    with pytest.raises(ModelRefused, match="draws random numbers, or keeps something between calls"):
        check_repeatable(CASE, {"y": first}, {"y": again}, ())
    with pytest.raises(ModelRefused, match=r"output 'y'\): forward changes its state: a, b"):
        check_repeatable(CASE, {"y": first}, {"y": again}, ("b", "a"))


def _rows(spec, function) -> None:
    case = make_case(spec, "c", {"batch": 4}, padded=False)
    check_rows(spec, lambda case: {"y": function(case.inputs["x"])}, case, {"y": function(case.inputs["x"])})


@pytest.mark.parametrize("function", [lambda x: x * 2, lambda x: x.argmax(1), lambda x: x.mean(0), lambda x: x[:, :0]])
def test_rows_that_stand_alone(spec, function):
    _rows(spec, function)  # a result without rows is refused elsewhere, by its shape


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x - x.mean(0),
        lambda x: np.exp(x) / np.exp(x).sum(0),
        lambda x: np.sort(x, 0),
        lambda x: x + x.std(),
    ],
    ids=["batch mean", "softmax over rows", "sorted rows", "std of all"],
)
def test_rows_that_depend_on_each_other_are_refused(spec, function):
    with pytest.raises(ModelRefused, match="rows depend on each other"):
        _rows(spec, function)
