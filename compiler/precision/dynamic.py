"""int8 with activations scaled while running: DynamicQuantizeLinear and MatMulInteger, for ONNX Runtime.

No calibration, and every row of the batch shares one scale: for models bound by their matrix products.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import TYPE_CHECKING

import numpy as np

from compiler.precision.graph import add_initializer, add_node, attribute, constant, insert_after_source
from compiler.precision.quantize import divided
from compiler.precision.weights import Smoothing, quantized_weight, weight_of

if TYPE_CHECKING:
    import onnx_ir as ir

DYNAMIC_OPS = ("MatMul", "Gemm")


def quantize_dynamic(
    graph: ir.Graph, names: Set[str], weight_bits: int, smoothing: Mapping[str, Smoothing] | None = None
) -> dict[str, int]:
    """Replaces the named MatMul and Gemm nodes by integer products with one scale per output channel.

    The shape is the one that ONNX Runtime fuses into DynamicQuantizeMatMul:

        x -> DynamicQuantizeLinear -> MatMulInteger -> Cast -> Mul -> (Add bias)
                       scale --> Mul (weight scales) ----------^

    Returns:
        Counts of what was replaced.
    """
    scaled: dict[str, tuple[ir.Value, ir.Value, ir.Value]] = {}
    replaced = 0
    for node in list(graph):
        if node.name in names and node.op_type in DYNAMIC_OPS:
            _replace(graph, node, weight_bits, scaled, (smoothing or {}).get(node.inputs[0].name or ""))
            replaced += 1
    return {"quantized_nodes": replaced, "dynamic_scales": len(scaled)}


def _replace(
    graph: ir.Graph,
    node: ir.Node,
    weight_bits: int,
    scaled: dict[str, tuple[ir.Value, ir.Value, ir.Value]],
    smoothing: Smoothing | None,
) -> None:
    from onnx_ir import DataType

    data, found = node.inputs[0], weight_of(node)
    assert data is not None and data.name and found is not None
    if data.name not in scaled:
        scaled[data.name] = _scale(graph, divided(graph, data, smoothing) if smoothing else data)
    quantized, scale, zero = scaled[data.name]
    array = constant(node.inputs[found.index])
    assert array is not None
    if attribute(node, "transB", 0):
        array = array.T
    if smoothing is not None:
        array = np.multiply(array, smoothing.factors[:, None])
    steps, channels = quantized_weight(array, 1, weight_bits)
    name = node.inputs[found.index].name
    weight = add_initializer(graph, f"{name}_int8", steps)
    weight_scale = add_initializer(graph, f"{name}_int8_scale", channels)
    weight_zero = add_initializer(graph, f"{name}_int8_zero_point", np.zeros(channels.shape, dtype=np.int8))
    out = node.outputs[0]
    assert out.name
    product = add_node(
        "MatMulInteger", [quantized, weight, zero, weight_zero], f"{out.name}_int32", DataType.INT32, out.shape
    )
    cast = add_node(
        "Cast", [product.outputs[0]], f"{out.name}_float", DataType.FLOAT, out.shape, {"to": int(DataType.FLOAT)}
    )
    scales = add_node("Mul", [scale, weight_scale], f"{out.name}_scales", DataType.FLOAT, None)
    nodes = [
        product,
        cast,
        scales,
        add_node("Mul", [cast.outputs[0], scales.outputs[0]], f"{out.name}_scaled", DataType.FLOAT, out.shape),
    ]
    if len(node.inputs) > 2 and node.inputs[2] is not None:
        nodes.append(
            add_node("Add", [nodes[-1].outputs[0], node.inputs[2]], f"{out.name}_biased", DataType.FLOAT, out.shape)
        )
    graph.insert_before(node, nodes)
    last, name = nodes[-1].outputs[0], out.name
    out.replace_all_uses_with(last, replace_graph_outputs=True)
    graph.remove(node, safe=True)
    last.name = name


def _scale(graph: ir.Graph, data: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
    import onnx_ir
    from onnx_ir import DataType

    outputs = [
        onnx_ir.Value(name=f"{data.name}_u8", type=onnx_ir.TensorType(DataType.UINT8), shape=data.shape),
        onnx_ir.Value(name=f"{data.name}_u8_scale", type=onnx_ir.TensorType(DataType.FLOAT), shape=onnx_ir.Shape([])),
        onnx_ir.Value(
            name=f"{data.name}_u8_zero_point", type=onnx_ir.TensorType(DataType.UINT8), shape=onnx_ir.Shape([])
        ),
    ]
    node = onnx_ir.node("DynamicQuantizeLinear", [data], outputs=outputs, name=f"{data.name}_dynamic")
    insert_after_source(graph, data, [node])
    return outputs[0], outputs[1], outputs[2]
