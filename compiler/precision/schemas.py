"""What an operator's schema allows: read from ONNX and from ONNX Runtime, for the opset that the graph has.

No list of operators is kept by hand: such lists are wrong for the next opset.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import onnx_ir as ir


@dataclass(frozen=True)
class Slot:
    """An input or output of an operator.

    Attributes:
        variable: the type variable, such as `T`, or a fixed type such as `tensor(float)`.
        types: what it may be, such as `tensor(float16)`.
    """

    variable: str
    types: frozenset[str]


@dataclass(frozen=True)
class Schema:
    """The types of an operator's inputs and outputs; the last repeats where it is variadic."""

    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]

    def input(self, index: int) -> Slot | None:
        return self.inputs[min(index, len(self.inputs) - 1)] if self.inputs else None

    def output(self, index: int) -> Slot | None:
        return self.outputs[min(index, len(self.outputs) - 1)] if self.outputs else None


def schema_of(node: ir.Node, opsets: Mapping[str, int]) -> Schema | None:
    """Returns the schema of a node's operator at the graph's opset, or None where nobody knows the operator."""
    domain = "" if node.domain == "ai.onnx" else node.domain
    return _schema(domain, node.op_type, opsets.get(domain, 1))


@cache
def _schema(domain: str, op_type: str, opset: int) -> Schema | None:
    import onnx.defs

    try:
        found = onnx.defs.get_schema(op_type, opset, domain)
    except onnx.defs.SchemaError:
        return _onnxruntime_schemas().get((domain, op_type))
    return Schema(
        tuple(Slot(s.type_str, frozenset(s.types)) for s in found.inputs),
        tuple(Slot(s.type_str, frozenset(s.types)) for s in found.outputs),
    )


@cache
def _onnxruntime_schemas() -> Mapping[tuple[str, str], Schema]:
    """Returns the schemas of ONNX Runtime's own operators (com.microsoft); none where this build does not list them."""
    try:
        from onnxruntime.capi import onnxruntime_pybind11_state as state

        listed = state.get_all_operator_schema()
    except (ImportError, AttributeError):
        return {}
    schemas = {}
    for found in sorted(listed, key=lambda s: int(s.since_version)):
        if found.domain:
            allowed = {c.type_param_str: frozenset(c.allowed_type_strs) for c in found.type_constraints}
            schemas[found.domain, found.name] = Schema(_slots(found.inputs, allowed), _slots(found.outputs, allowed))
    return schemas


def _slots(parameters: Any, allowed: Mapping[str, frozenset[str]]) -> tuple[Slot, ...]:
    return tuple(Slot(p.typeStr, allowed.get(p.typeStr, frozenset({p.typeStr}))) for p in parameters)
