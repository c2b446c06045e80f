"""Which nodes must stay in fp32, by what they are: schemas, subgraphs, constants, epsilons, shape arithmetic.

What only the values can tell is in `magnitudes.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from compiler.dtypes import AnyArray
from compiler.precision.graph import attribute, constant
from compiler.precision.schemas import Schema, schema_of

if TYPE_CHECKING:
    import onnx_ir as ir


@dataclass(frozen=True)
class HalfType:
    """A 16-bit float.

    Attributes:
        name: the precision's name.
        onnx: the element type's name in ONNX.
        largest: its largest finite value.
        tiny: its smallest value over 0 (denormal).
        normal: its smallest value with all its bits.
    """

    name: str
    onnx: str
    largest: float
    tiny: float
    normal: float

    def rounded(self, values: AnyArray) -> AnyArray:
        """Returns the values as the type holds them, in float64."""
        import ml_dtypes

        with np.errstate(over="ignore"):
            half = values.astype(np.float16 if self.name == "fp16" else ml_dtypes.bfloat16)
        return half.astype(np.float64)


FP16 = HalfType("fp16", "FLOAT16", 65504.0, 2.0**-24, 2.0**-14)
BF16 = HalfType("bf16", "BFLOAT16", float.fromhex("0x1.fep127"), 2.0**-133, 2.0**-126)

# Moves or spreads values without changing them.
_SHAPING = frozenset({"Identity", "Expand", "Unsqueeze", "Squeeze", "Reshape", "Transpose", "Slice", "Concat", "Tile"})
_ARITHMETIC = frozenset({"Add", "Sub", "Mul", "Min", "Max", "Clip"})
# What a large constant passes through on its way to a Softmax: a mask that is added, chosen or spread.
_MASK_PATH = _SHAPING | _ARITHMETIC | {"Where", "Cast"}
_MASK_END = frozenset({"Softmax", "LogSoftmax"})
# What a small constant, once added, protects: a division, a logarithm. Up to there it must not become 0.
_EPSILON_PATH = _SHAPING | _ARITHMETIC | {"Sqrt", "Pow", "Neg"}
_EPSILON_END = frozenset({"Div", "Reciprocal", "Log"})
# Arithmetic of sizes and positions that is done in floats: an integer over 2,048 is not exact in fp16.
_EXACT = _SHAPING | _ARITHMETIC | {"Div", "Floor", "Ceil", "Round", "Sqrt", "Pow", "Neg", "Cast", "Gather", "Range"}


def low_variables(node: ir.Node, schema: Schema, half: HalfType) -> frozenset[str]:
    """Returns the type variables of a node that are float32 now and may be the half type.

    A variable that no input binds follows an attribute (`dtype`, `value`, `stash_type`) and stays, but for Cast's.
    """
    from onnx_ir import DataType

    wanted = f"tensor({half.onnx.lower()})"
    found = set()
    for index, value in enumerate(node.inputs):
        slot = schema.input(index)
        if value is not None and slot is not None and value.dtype == DataType.FLOAT and wanted in slot.types:
            found.add(slot.variable)
    if node.op_type == "Cast" and attribute(node, "to", 0) == DataType.FLOAT:
        slot = schema.output(0)
        assert slot is not None
        found.add(slot.variable)
    # A fixed type in the schema is no variable: `tensor(float)` cannot change.
    return frozenset(v for v in found if not v.startswith("tensor("))


def static_holds(model: ir.Model, half: HalfType) -> dict[str, str]:
    """Returns the reason by name for each node that must stay in fp32 whatever the data."""
    holds: dict[str, str] = {}
    for node in model.graph:
        name = node.name or ""
        for reason in _own_reasons(model, node, half):
            holds.setdefault(name, reason)
    for reason, nodes in (*_masks(model.graph, half), *_epsilons(model.graph, half), *_exact_arithmetic(model)):
        for node in nodes:
            holds.setdefault(node.name or "", reason)
    return holds


def _own_reasons(model: ir.Model, node: ir.Node, half: HalfType) -> Iterator[str]:
    from onnx_ir import DataType

    if any(a.type.name in ("GRAPH", "GRAPHS") for a in node.attributes.values()):
        yield "it holds a subgraph"
        return
    values = [v for v in (*node.inputs, *node.outputs) if v is not None]
    if any(v.dtype is None for v in values):
        yield "the type of one of its tensors is not known"
        return
    if not any(v.dtype == DataType.FLOAT for v in values):
        return
    schema = schema_of(node, model.opset_imports)
    if schema is None:
        yield f"no schema of {node.domain or 'ai.onnx'}.{node.op_type} is known"
    elif not low_variables(node, schema, half):
        version = model.opset_imports.get(node.domain, 1)
        yield f"its schema at opset {version} has no {half.onnx.lower()}"
    epsilon = attribute(node, "epsilon", None)
    if isinstance(epsilon, float) and 0 < epsilon < half.tiny:
        yield f"epsilon {epsilon:.3g} is 0 in {half.name}"


def _masks(graph: ir.Graph, half: HalfType) -> Iterator[tuple[str, Iterable[ir.Node]]]:
    """Constants that are too large: their readers, and what these give on the way to a Softmax."""
    for value in list(graph.initializers.values()):
        largest = _largest_finite(value)
        if largest is None or abs(largest) <= half.largest / 2:
            continue
        reason = f"the constant {largest:.6g} (with what is added to it) does not fit {half.name}"
        yield reason, _downstream(value, _MASK_PATH, _MASK_END)


def _epsilons(graph: ir.Graph, half: HalfType) -> Iterator[tuple[str, Iterable[ir.Node]]]:
    """Single numbers that would become 0: their readers, up to the division that they protect."""
    for value in list(graph.initializers.values()):
        array = constant(value)
        if array is None or array.dtype != np.float32 or array.size != 1:
            continue
        number = float(array.reshape(-1)[0])
        if number and not half.rounded(array).any():
            yield f"the constant {number:.3g} is 0 in {half.name}", _downstream(value, _EPSILON_PATH, _EPSILON_END)


def _exact_arithmetic(model: ir.Model) -> Iterator[tuple[str, Iterable[ir.Node]]]:
    """Float arithmetic whose result is a size, an index or an angle: held back to its source."""
    from onnx_ir import DataType

    for node in model.graph:
        schema = schema_of(node, model.opset_imports)
        for index, value in enumerate(node.inputs):
            if value is None or value.dtype != DataType.FLOAT:
                continue
            slot = schema.input(index) if schema is not None else None
            if node.op_type == "Cast" and _is_integer(int(str(attribute(node, "to", 0)))):
                yield "it computes integers (sizes, indices) in floats", (*_upstream(value), node)
            elif node.op_type in ("Sin", "Cos"):
                yield (
                    "it computes the angle of a Sin or Cos, whose rounding grows with the angle",
                    (*_upstream(value), node),
                )
            elif slot is not None and slot.types == {"tensor(float)"}:
                yield (
                    f"its result is the {node.op_type}'s input {index}, which is float32 by its schema",
                    _upstream(value),
                )
            elif node.op_type == "Resize" and index in (1, 2):
                yield "it computes the scales or the region of a Resize", _upstream(value)
            elif node.op_type == "Range":
                yield "it computes the bounds of a Range", _upstream(value)


def _downstream(value: ir.Value, path: frozenset[str], end: frozenset[str]) -> list[ir.Node]:
    """Returns the readers of a value, theirs along `path`, up to and with the first of `end`."""
    reached: dict[ir.Node, None] = {}
    open_values, first = [value], True
    while open_values:
        for use in open_values.pop().uses():
            node = use.node
            if node in reached or not (first or node.op_type in path or node.op_type in end):
                continue
            reached[node] = None
            if node.op_type in path:
                open_values.extend(node.outputs)
        first = False
    return list(reached)


def _upstream(value: ir.Value) -> list[ir.Node]:
    """Returns the nodes that compute a value, as far back as they are plain arithmetic without weights."""
    reached: dict[ir.Node, None] = {}
    open_values = [value]
    while open_values:
        node = open_values.pop().producer()
        if node is None or node in reached or node.op_type not in _EXACT:
            continue
        if any((a := constant(v)) is not None and a.size > 1024 for v in node.inputs):
            continue
        reached[node] = None
        open_values.extend(v for v in node.inputs if v is not None)
    return list(reached)


def _largest_finite(value: ir.Value) -> float | None:
    array = constant(value)
    if array is None or array.dtype != np.float32 or not array.size:
        return None
    low, high = float(array.min()), float(array.max())
    if not (np.isfinite(low) and np.isfinite(high)):
        finite = array[np.isfinite(array)]
        if not finite.size:
            return None
        low, high = float(finite.min()), float(finite.max())
    return low if -low > high else high


def _is_integer(element_type: int) -> bool:
    from onnx_ir import DataType

    return bool(DataType(element_type).is_integer())
