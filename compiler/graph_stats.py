"""What a graph costs: operators, parameters, floating-point operations and bytes moved, at given sizes.

Shapes are those of a real run with every intermediate value exposed: no shape inference knows the fused
operators, and none is right about data-dependent sizes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from compiler.cases import Case
from compiler.dtypes import AnyArray

if TYPE_CHECKING:
    import onnx_ir as ir


@dataclass(frozen=True)
class GraphStats:
    """The cost of one run.

    Attributes:
        ops: nodes by operator, contrib operators with their domain.
        parameters: numbers held in initializers.
        flops: 2 for each multiply-add of MatMul, Gemm, Conv and attention, 1 for each output element elsewhere.
        bytes_moved: each node's inputs and outputs; what a fused kernel keeps in registers is not in the graph.
    """

    nodes: int
    ops: dict[str, int]
    parameters: int
    flops: int
    bytes_moved: int

    def to_json(self) -> dict[str, Any]:
        return {
            "nodes": self.nodes,
            "ops": self.ops,
            "parameters": self.parameters,
            "flops": self.flops,
            "bytes_moved": self.bytes_moved,
        }


def graph_stats(model: ir.Model, case: Case) -> GraphStats:
    """Runs the graph once on a case and adds up what each node of the main graph does."""
    import onnx_ir

    proto = onnx_ir.to_proto(model)
    values = _run_exposed(proto, case)
    initializers = {i.name: (tuple(i.dims), _element_bytes(i.data_type)) for i in proto.graph.initializer}
    shapes = {name: (array.shape, array.itemsize) for name, array in {**case.inputs, **values}.items()} | initializers
    flops = bytes_moved = 0
    for node in proto.graph.node:
        inputs = [shapes[name] for name in node.input if name in shapes]
        outputs = [shapes[name] for name in node.output if name in shapes]
        bytes_moved += sum(prod(shape) * size for shape, size in (*inputs, *outputs))
        if outputs:
            flops += _flops(node, [shape for shape, _ in inputs], outputs[0][0])
    ops = Counter((f"{n.domain}:" if n.domain else "") + n.op_type for n in proto.graph.node)
    return GraphStats(
        nodes=len(proto.graph.node),
        ops=dict(sorted(ops.items(), key=lambda item: (-item[1], item[0]))),
        parameters=sum(prod(shape) for shape, _ in initializers.values()),
        flops=int(flops),
        bytes_moved=int(bytes_moved),
    )


def _flops(node: Any, inputs: Sequence[tuple[int, ...]], output: tuple[int, ...]) -> int:
    """Returns the floating-point operations of one node."""
    attributes = {a.name: a for a in node.attribute}
    if node.op_type in ("MatMul", "FusedMatMul") and inputs:
        inner = inputs[0][-2] if _flag(attributes, "transA") else inputs[0][-1]
        return 2 * prod(output) * inner
    if node.op_type == "Gemm":
        inner = inputs[0][0] if _flag(attributes, "transA") else inputs[0][1]
        return 2 * prod(output) * inner
    if node.op_type == "Conv":  # weight: [out channels, in channels / groups, kernel...]
        return 2 * prod(output) * prod(inputs[1][1:])
    if node.op_type == "MultiHeadAttention" and len(inputs) >= 2 and len(inputs[0]) == 3:
        batch, queries, hidden = inputs[0]
        # Q K^T and the product with V, each [queries, keys] x hidden.
        return 4 * batch * queries * inputs[1][1] * hidden
    return prod(output)


def _flag(attributes: Mapping[str, Any], name: str) -> bool:
    return bool(attributes[name].i) if name in attributes else False


def _run_exposed(proto: Any, case: Case) -> dict[str, AnyArray]:
    """Runs a copy of the graph whose every intermediate value is an output, as it stands (no optimisation)."""
    import onnx
    import onnxruntime as ort

    exposed = onnx.ModelProto()
    exposed.CopyFrom(proto)
    present = {value.name for value in exposed.graph.output}
    for node in exposed.graph.node:
        for name in node.output:
            if name and name not in present:
                exposed.graph.output.append(onnx.helper.make_empty_tensor_value_info(name))
                present.add(name)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    session = ort.InferenceSession(exposed.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [o.name for o in session.get_outputs()]
    feeds = {i.name: case.inputs[i.name] for i in session.get_inputs()}
    values = zip(names, session.run(names, feeds), strict=True)
    return {name: value for name, value in values if isinstance(value, np.ndarray)}


def _element_bytes(onnx_type: int) -> int:
    from compiler.dtypes import dtype_from_onnx

    dtype = dtype_from_onnx(onnx_type)
    return dtype.numpy.itemsize if dtype else 1
