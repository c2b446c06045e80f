"""Small helpers on an onnx_ir graph that every conversion needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from compiler.dtypes import AnyArray

if TYPE_CHECKING:
    import onnx_ir as ir


def prepare(model: ir.Model) -> ir.Model:
    """Returns a copy with constants as initializers, a name on everything and types as far as they can be inferred."""
    import onnx_ir
    from onnx_ir.passes.common import LiftConstantsToInitializersPass, NameFixPass, ShapeInferencePass

    copy = model.clone()
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(copy)
    NameFixPass()(copy)
    ShapeInferencePass()(copy)
    for value in copy.graph.initializers.values():
        tensor = value.const_value
        # What is read from a file is decoded again each time that it is asked for: once is enough for all clones.
        if tensor is not None and not isinstance(tensor, onnx_ir.Tensor | onnx_ir.StringTensor):
            value.const_value = onnx_ir.Tensor(tensor.numpy(), tensor.dtype, shape=tensor.shape, name=value.name)
    return copy


def constant(value: ir.Value | None) -> AnyArray | None:
    """Returns the array behind an initializer, or None where the value is computed or given."""
    if value is None or not value.is_initializer() or value.is_graph_input() or value.const_value is None:
        return None
    return np.asarray(value.const_value.numpy())


def attribute(node: ir.Node, name: str, default: object) -> object:
    """Returns an attribute's value, or the operator's default."""
    found = node.attributes.get(name)
    return default if found is None else found.value


def add_initializer(graph: ir.Graph, name: str, array: AnyArray) -> ir.Value:
    """Registers a constant under the first free name that starts with `name`."""
    import onnx_ir

    free, index = name, 1
    while free in graph.initializers:
        free, index = f"{name}_{index}", index + 1
    contiguous = np.ascontiguousarray(array).reshape(array.shape)
    value = onnx_ir.Value(
        name=free,
        type=onnx_ir.TensorType(onnx_ir.DataType.from_numpy(array.dtype)),
        shape=onnx_ir.Shape(array.shape),
        const_value=onnx_ir.tensor(contiguous, name=free),
    )
    graph.register_initializer(value)
    return value


def add_node(
    op_type: str,
    inputs: Sequence[ir.Value | None],
    output: str,
    dtype: ir.DataType,
    shape: ir.Shape | None,
    attributes: Mapping[str, int | float] | None = None,
) -> ir.Node:
    """Returns a node of the default domain with one typed output, not yet in a graph."""
    import onnx_ir

    value = onnx_ir.Value(name=output, type=onnx_ir.TensorType(dtype), shape=shape)
    return onnx_ir.node(op_type, inputs, dict(attributes or {}), outputs=[value], name=f"{output}_{op_type}")


def insert_after_source(graph: ir.Graph, value: ir.Value, nodes: Sequence[ir.Node]) -> None:
    """Inserts nodes where `value` is first known, which keeps the graph sorted."""
    producer = value.producer()
    if producer is not None:
        graph.insert_after(producer, nodes)
    elif len(graph):
        graph.insert_before(graph[0], nodes)
    else:
        graph.extend(nodes)


def drop_unused_initializers(graph: ir.Graph) -> None:
    """Removes constants that nothing reads any more."""
    for name in [n for n, v in graph.initializers.items() if not v.uses() and not v.is_graph_output()]:
        del graph.initializers[name]
