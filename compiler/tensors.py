"""Dims and tensors of a spec: named sizes with min, opt and max, and the inputs and outputs that use them."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from compiler.dtypes import DTYPES, DType
from compiler.errors import did_you_mean, one_of
from compiler.yaml_reader import Node, Table

BATCH_DIM = "batch"

_TENSOR_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./:-]{0,127}")
_DIM_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


@dataclass(frozen=True)
class Dim:
    """A named size that varies between requests. `opt` is the size to be fastest at."""

    name: str
    min: int
    opt: int
    max: int


@dataclass(frozen=True)
class InputSpec:
    """An input tensor.

    Attributes:
        shape: one entry per axis, a fixed size or the name of a dim.
        values: `uniform` in `range`, or `padding_mask`: ones, then zeros, each row with at least one 1.
        range: smallest and largest value a request may hold (both included).
    """

    name: str
    dtype: DType
    shape: tuple[int | str, ...]
    values: str
    range: tuple[float, float]


@dataclass(frozen=True)
class OutputSpec:
    """An output tensor; dtype and shape are read from the file that ships and checked where given."""

    name: str
    dtype: DType | None
    shape: tuple[int | str, ...] | None


def read_dims(table: Table) -> dict[str, Dim]:
    """Reads the `dims` mapping: `name: {min, opt, max}`."""
    node = table.get("dims")
    dims = {}
    for name, child in node.mapping("dims").items() if node else ():
        if not _DIM_NAME.fullmatch(name):
            child.fail(f"dim name is {name!r}; allowed: letters, digits and _, not starting with a digit")
        parts = child.table(f"dim '{name}'", required=("max",), optional=("min", "opt"))
        maximum = parts["max"].integer(f"max of dim '{name}'", 1, 2**31 - 1)
        low, best = parts.get("min"), parts.get("opt")
        minimum = low.integer(f"min of dim '{name}'", 1, 2**31 - 1) if low else 1
        if minimum > maximum:
            child.fail(f"dim '{name}' has min {minimum} above max {maximum}")
        opt = best.integer(f"opt of dim '{name}'", minimum, maximum) if best else maximum
        if name == BATCH_DIM and minimum != 1:
            child.fail(
                f"min of dim '{BATCH_DIM}' is {minimum}; it must be 1, since Triton sends single requests as they come"
            )
        dims[name] = Dim(name, minimum, opt, maximum)
    return dims


def read_tensor(node: Node, what: str, extra: tuple[str, ...] = ()) -> Table:
    """Checks a tensor's mapping and that its name is one that ONNX and Triton both take."""
    table = node.table(what, required=("name",), optional=("dtype", "shape", *extra))
    name = table["name"].string(f"{what} name")
    if not _TENSOR_NAME.fullmatch(name):
        table["name"].fail(f"{what} name is {name!r}; allowed: letters, digits and _./:- (no - . / : first)")
    return table


def read_shape(node: Node, dims: dict[str, Dim], what: str) -> tuple[int | str, ...]:
    """Reads a shape: fixed sizes and names of dims."""
    shape: list[int | str] = []
    for axis in node.items(f"shape of {what}"):
        if isinstance(axis.value, str):
            if axis.value not in dims:
                axis.fail(
                    f"shape of {what} has the unknown dim '{axis.value}'{did_you_mean(axis.value, dims)}; "
                    f"dims: {one_of(dims)}"
                )
            shape.append(axis.value)
        else:
            shape.append(axis.integer(f"a size in the shape of {what}", 1, 2**31 - 1))
    names = [d for d in shape if isinstance(d, str)]
    if len(set(names)) != len(names):
        node.fail(f"shape of {what} has the same dim on two axes: {shape}")
    return tuple(shape)


def refuse_duplicates(node: Node, names: list[str], what: str) -> None:
    for name in names:
        if names.count(name) > 1:
            node.fail(f"two {what}s are named '{name}'")


def read_input(node: Node, dims: dict[str, Dim]) -> InputSpec:
    table = read_tensor(node, "input", ("range", "values"))
    name = table["name"].string("input name")
    for key in ("dtype", "shape"):
        if table.get(key) is None:
            node.fail(f"input '{name}' lacks the key '{key}'")
    dtype = DTYPES[table["dtype"].choice(f"dtype of input '{name}'", DTYPES)]
    if dtype.name == "string":
        table["dtype"].fail(f"input '{name}' is a string; PyTorch models take numbers, text needs a Python step")
    values_node, range_node = table.get("values"), table.get("range")
    values = values_node.choice(f"values of input '{name}'", ("uniform", "padding_mask")) if values_node else "uniform"
    shape = read_shape(table["shape"], dims, f"input '{name}'")
    if values == "padding_mask":
        if range_node:
            range_node.fail(f"input '{name}' is a padding_mask: its values are 0 and 1, drop the range")
        if len(shape) < 2:
            node.fail(f"input '{name}' is a padding_mask and needs the axes [rows, positions], not {list(shape)}")
        return InputSpec(name, dtype, shape, values, (0, 1))
    return InputSpec(name, dtype, shape, values, _range(table, node, name, dtype))


def _range(table: Table, node: Node, name: str, dtype: DType) -> tuple[float, float]:
    range_node = table.get("range")
    if range_node is None:
        if dtype.is_integer:
            node.fail(
                f"input '{name}' is {dtype.name} and lacks the key 'range'",
                hint="whole numbers are ids or counts: give the smallest and largest allowed, range: [0, 30521]",
            )
        return (0, 1) if dtype.name == "bool" else (-4.0, 4.0)
    bounds = range_node.items(f"range of input '{name}'")
    if len(bounds) != 2:
        range_node.fail(f"range of input '{name}' needs two numbers [smallest, largest], not {len(bounds)}")
    lowest: float = -math.inf
    highest: float = math.inf
    if dtype.is_integer:
        info = np.iinfo(dtype.numpy)  # type: ignore[type-var]
        lowest, highest = info.min, info.max
        low, high = (float(b.integer(f"range of input '{name}'", int(lowest), int(highest))) for b in bounds)
    else:
        if dtype.is_float:
            highest = float(np.finfo(dtype.name).max)
            lowest = -highest
        low, high = (b.number(f"range of input '{name}'", lowest, highest) for b in bounds)
    if low > high:
        range_node.fail(f"range of input '{name}' is [{low:g}, {high:g}]: the smallest is above the largest")
    return low, high


def read_output(node: Node, dims: dict[str, Dim], what: str = "output") -> OutputSpec:
    """Reads a tensor whose dtype and shape may be left to the graph; `what` names it in errors."""
    table = read_tensor(node, what)
    name = table["name"].string(f"{what} name")
    dtype, shape = table.get("dtype"), table.get("shape")
    return OutputSpec(
        name,
        DTYPES[dtype.choice(f"dtype of {what} '{name}'", DTYPES)] if dtype else None,
        read_shape(shape, dims, f"{what} '{name}'") if shape else None,
    )


def check_batch_axis(table: Table, dims: dict[str, Dim], tensors: Sequence[InputSpec | OutputSpec]) -> None:
    """Refuses a batch dim that Triton could not batch along, and one that it would batch along unasked."""
    firsts = [(t.name, t.shape[0] if t.shape else None) for t in tensors if t.shape is not None]
    if BATCH_DIM in dims:
        for name, first in firsts:
            if first != BATCH_DIM:
                table.node.fail(
                    f"the first axis of '{name}' is {first!r}, not '{BATCH_DIM}'",
                    hint=f"Triton merges requests along the first axis of every tensor; reorder the axes, "
                    f"or give the dim another name than '{BATCH_DIM}' to serve the model without batching",
                )
    elif firsts and all(isinstance(first, str) for _, first in firsts):
        table.node.fail(
            f"every tensor starts with a variable dim ('{firsts[0][1]}'), and none of them is '{BATCH_DIM}'",
            hint=f"Triton's auto-complete takes such an axis for the batch; name it '{BATCH_DIM}'",
        )
