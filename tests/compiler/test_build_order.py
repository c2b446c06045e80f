from __future__ import annotations

import pytest

from compiler.build_order import order_by_need
from compiler.errors import UsageError


def test_what_is_needed_comes_first_and_the_rest_keeps_its_order():
    needs = {"outer": ("inner", "z"), "inner": ("a",), "z": ("elsewhere",)}
    assert order_by_need(["outer", "b", "z", "inner", "a"], needs) == ["a", "inner", "z", "outer", "b"]


def test_d16_ensembles_that_need_each_other_are_refused_with_the_path():
    with pytest.raises(UsageError, match=r"need each other in a circle: b -> c -> b\n"):
        order_by_need(["a", "b", "c"], {"a": ("b",), "b": ("c",), "c": ("b",)})


def test_d16_an_ensemble_of_itself_is_refused():
    with pytest.raises(UsageError, match=r"in a circle: a -> a\n"):
        order_by_need(["a"], {"a": ("a",)})
