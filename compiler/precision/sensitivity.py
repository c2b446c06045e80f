"""How much each node alone loses in int8: one run of a graph that holds every node twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from compiler.precision.calibration import TensorRange
from compiler.precision.graph import add_node
from compiler.precision.observe import Samples, observe
from compiler.precision.quantize import Quantizer, Scheme

if TYPE_CHECKING:
    import onnx_ir as ir


def local_errors(
    model: ir.Model, names: Sequence[str], ranges: Mapping[str, TensorRange], scheme: Scheme, samples: Samples
) -> dict[str, float]:
    """Returns |int8 - fp32|^2 / |fp32|^2 of each node's output, all other nodes in fp32.

    Each named node gets a copy on the same fp32 inputs, and only the copies are quantised. The graph itself sums the
    squares, so that only two numbers a node come out of it.
    """
    import onnx_ir

    double = model.clone()
    chosen = set(names)
    copies = {}
    for node in list(double.graph):
        if node.name in chosen:
            value = onnx_ir.Value(
                name=f"{node.name}__alone_out", type=node.outputs[0].type, shape=node.outputs[0].shape
            )
            copy = onnx_ir.Node(
                node.domain,
                node.op_type,
                node.inputs,
                node.attributes.values(),
                outputs=[value],
                name=f"{node.name}__alone",
            )
            double.graph.insert_after(node, [copy, *_squares(node, value)])
            copies[node.name] = copy
    quantizer = Quantizer(double.graph, ranges, scheme)
    for copy in copies.values():
        quantizer.quantize_node(copy)
    sums: dict[str, float] = {}
    wanted = [f"{name}__{what}" for name in copies for what in ("error", "power")]
    for arrays in observe(double, wanted, samples):
        for name, array in arrays.items():
            sums[name] = sums.get(name, 0.0) + float(array)
    return {n: sums[f"{n}__error"] / max(sums[f"{n}__power"], 1e-30) for n in copies}


def _squares(node: ir.Node, alone: ir.Value) -> list[ir.Node]:
    from onnx_ir import DataType, Shape

    out = node.outputs[0]
    difference = add_node("Sub", [out, alone], f"{node.name}__difference", DataType.FLOAT, out.shape)
    return [
        difference,
        add_node(
            "ReduceSumSquare",
            [difference.outputs[0]],
            f"{node.name}__error",
            DataType.FLOAT,
            Shape([]),
            {"keepdims": 0},
        ),
        add_node("ReduceSumSquare", [out], f"{node.name}__power", DataType.FLOAT, Shape([]), {"keepdims": 0}),
    ]
