from __future__ import annotations

from types import SimpleNamespace

import pytest

from compiler.guards import guards_of, smallest_sizes, unproved_guards
from compiler.tensors import Dim

SPEC = SimpleNamespace(
    dims={"h": Dim("h", 8, 8, 40), "w": Dim("w", 1, 4, 1_000_000)},
    inputs=[SimpleNamespace(shape=("n", 3, "h", "w"))],
)
PREFIX = "Constraints violated (h)!\n  - Not all values of h = L['args'][0].size()[2] in the specified range "


def test_guards_are_read_in_the_spec_s_dims():
    text = (
        PREFIX
        + "8 <= h <= 40 satisfy the generated guard (-2) + 2*(L['args'][0].size()[2] // 2) < L['args'][0].size()[2]."
    )
    assert guards_of(text, SPEC) == ["(-2) + 2*(h // 2) < h"]


def test_a_size_that_became_a_number_is_no_guard():
    text = PREFIX + "h <= 40 satisfy the generated guard L['args'][0].size()[2] < 9.\n"
    assert guards_of(text, SPEC) == ["h < 9"]
    assert (
        guards_of(text + "  - You marked h as dynamic but your code specialized it to be a constant (9).", SPEC) == []
    )
    assert guards_of("something else", SPEC) == []


@pytest.mark.parametrize(
    "guard",
    ["2*(h // 2) - 2 < h", "h >= 8", "8 <= h <= 40", "Max(1, h) == h", "(h % 2) < 2", "h * w >= 8", "w > 0", "-h < 0"],
)
def test_guards_that_hold_for_every_size(guard):
    assert unproved_guards([guard], SPEC) == []


@pytest.mark.parametrize(
    "guard",
    [
        "h < 40",
        "h != 31",
        "(h % 2) == 0",
        "w < 1000000",
        "h < w",
        "unknown > 0",
        "__import__('os')",
        "h.x > 0",
        "1 //",
        "h // (h - 8) >= 0",
    ],
)
def test_guards_that_fail_somewhere_or_are_no_arithmetic(guard):
    assert unproved_guards([guard], SPEC) == [guard]


def test_the_smallest_size_from_which_on_the_guards_hold():
    assert smallest_sizes(["h > 11", "h // 4 != 3", "h >= 8"], SPEC) == {"h": 16}
    assert smallest_sizes(["h // 4 != 2"], SPEC) == {"h": 12}
    assert smallest_sizes(["h % 2 == 0"], SPEC) == {} == smallest_sizes(["h < 9"], SPEC)
    assert smallest_sizes(["h > 11", "unknown > 0"], SPEC) == {}
