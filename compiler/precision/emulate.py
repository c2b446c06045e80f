"""A half-precision graph as an engine computes it, on a CPU that has no half kernels.

Every node computes in fp32 and its result is rounded to the half type before the next one reads it. ONNX Runtime's own
way (casts around nodes, then cast pairs removed) keeps fp32 between nodes, and with it values that overflow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from compiler.precision.graph import add_node

if TYPE_CHECKING:
    import onnx_ir as ir


def emulated(model: ir.Model) -> ir.Model:
    """Returns a copy in which only Casts have half inputs or outputs."""
    import onnx_ir
    from onnx_ir import DataType

    copy = model.clone()
    graph = copy.graph
    half = (DataType.FLOAT16, DataType.BFLOAT16)
    wide: dict[ir.Value, ir.Value] = {}
    for node in list(graph):
        if node.op_type == "Cast" and node.domain == "":
            continue
        for index, value in enumerate(node.inputs):
            if value is None or value.dtype not in half:
                continue
            if value not in wide:
                up = _cast(value, f"{value.name}__wide", DataType.FLOAT)
                graph.insert_before(node, [up])
                wide[value] = up.outputs[0]
            node.replace_input_with(index, wide[value])
        for value in node.outputs:
            dtype = value.dtype
            if dtype is None or dtype not in half:
                continue
            down = _cast(value, f"{value.name}__rounded", dtype)
            rounded = down.outputs[0]
            value.replace_all_uses_with(rounded, replace_graph_outputs=True)
            graph.insert_after(node, [down])
            # The use by the Cast itself was none yet: it is made here, after the others were moved.
            down.replace_input_with(0, value)
            value.type = onnx_ir.TensorType(DataType.FLOAT)
    return copy


def _cast(value: ir.Value, name: str, dtype: ir.DataType) -> ir.Node:
    return add_node("Cast", [value], name, dtype, value.shape, {"to": int(dtype)})
