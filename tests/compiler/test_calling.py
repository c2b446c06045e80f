from __future__ import annotations

import dataclasses
from collections import namedtuple

import numpy as np
import pytest

from compiler.calling import flatten_outputs, nested_inputs, output_leaves
from compiler.errors import ModelRefused

A, B, C = (np.full(2, i) for i in range(3))


def test_inputs_of_dicts_and_lists_are_nested():
    assert nested_inputs({"x": 1, "batch.left": 2, "batch.right": 3}) == {"x": 1, "batch": {"left": 2, "right": 3}}
    assert nested_inputs({"xs.1": "b", "xs.0": "a"}) == {"xs": ["a", "b"]}
    assert nested_inputs({"t.0.k": 1, "t.0.v": 2}) == {"t": [{"k": 1, "v": 2}]}
    assert nested_inputs({"d.1": 1, "d.2": 2}) == {"d": {"1": 1, "2": 2}}  # a list begins at 0


@dataclasses.dataclass
class Heads:
    logits: object
    hidden: object = None


Pair = namedtuple("Pair", ["left", "right"])


@pytest.mark.parametrize(
    ("result", "names"),
    [
        (A, [""]),
        ((A, None, B), ["output_0", "output_2"]),
        ({"a": A, "b": {"c": B, "d": [C, None]}}, ["a", "b.c", "b.d.0"]),
        (Heads(A, (B, C)), ["logits", "hidden.0", "hidden.1"]),
        (Pair(A, Heads(B)), ["left", "right.logits"]),
        ({0: A, "1": B}, ["output_0", "output_1"]),
        ({"head/cls": A, "a b": B}, ["head_cls", "a_b"]),
        (None, []),
    ],
)
def test_every_tensor_has_a_name_that_a_spec_can_give(result, names):
    assert list(output_leaves(result)) == names


def test_two_keys_that_would_be_one_name_are_refused():
    with pytest.raises(ModelRefused, match=r"two values that would both be called 'a\.b'"):
        output_leaves({"a.b": A, "a": {"b": B}})


def test_a09_names_are_matched_and_positions_taken_in_order():
    first, second = flatten_outputs({"b": B, "nothing": None, "a": A}, ["a", "b"])
    assert first is A and second is B
    one, two, three = flatten_outputs((A, (B, None, [C])), ["x", "y", "z"])
    assert one is A and two is B and three is C
    (only,) = flatten_outputs({"text": "t", "a": A}, ["a"])
    assert only is A


def test_a_wrong_count_shows_where_the_tensors_are():
    with pytest.raises(ModelRefused) as error:
        flatten_outputs((A, (B, C)), ["y"])
    assert error.value.message == "forward() returns 3 output(s) (by position: 0, 1.0, 1.1), the spec names 1: y"


def test_a_wrong_name_lists_tensors_only():
    with pytest.raises(ModelRefused) as error:
        flatten_outputs({"hidden": (A, B), "task": "t"}, ["hiden.1"])
    assert error.value.message == (
        "forward() returns no output 'hiden.1' (did you mean 'hidden.1'?); it returns: hidden.0, hidden.1"
    )
