"""What a graph costs: operators, parameters, floating-point operations and bytes moved, at given sizes.

Shapes are those of a real run with every intermediate value exposed: no shape inference knows the fused
operators, and none is right about data-dependent sizes.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compiler.cases import Case
from compiler.dtypes import AnyArray
from compiler.errors import ModelRefused
from compiler.targets.onnxruntime import MODEL_FILE, first_line, write_onnx

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
    values = _run_exposed(model, case)
    initializers = {
        name: (tuple(value.const_value.shape.numpy()), value.const_value.dtype.itemsize)
        for name, value in model.graph.initializers.items()
        if value.const_value is not None
    }
    shapes = {name: (array.shape, array.itemsize) for name, array in {**case.inputs, **values}.items()} | initializers
    flops = bytes_moved = 0.0
    for node in model.graph:
        inputs = [shapes[v.name] for v in node.inputs if v is not None and v.name in shapes]
        outputs = [shapes[v.name] for v in node.outputs if v.name in shapes]
        bytes_moved += sum(prod(shape) * size for shape, size in (*inputs, *outputs))
        if outputs:
            flops += node_flops(node, [shape for shape, _ in inputs], outputs[0][0])
    ops = Counter((f"{n.domain}:" if n.domain else "") + n.op_type for n in model.graph)
    return GraphStats(
        nodes=len(model.graph),
        ops=dict(sorted(ops.items(), key=lambda item: (-item[1], item[0]))),
        parameters=sum(prod(shape) for shape, _ in initializers.values()),
        flops=int(flops),
        bytes_moved=int(bytes_moved),
    )


def node_flops(node: ir.Node, inputs: Sequence[tuple[int, ...]], output: tuple[int, ...]) -> int:
    """Returns the floating-point operations of one node."""
    if node.op_type in ("MatMul", "FusedMatMul") and inputs:
        inner = inputs[0][-2] if _flag(node, "transA") else inputs[0][-1]
        return 2 * prod(output) * inner
    if node.op_type == "Gemm":
        inner = inputs[0][0] if _flag(node, "transA") else inputs[0][1]
        return 2 * prod(output) * inner
    if node.op_type == "Conv":  # weight: [out channels, in channels / groups, kernel...]
        return 2 * prod(output) * prod(inputs[1][1:])
    if node.op_type == "MultiHeadAttention" and len(inputs) >= 2 and len(inputs[0]) == 3:
        batch, queries, hidden = inputs[0]
        # Q K^T and the product with V, each [queries, keys] x hidden.
        return 4 * batch * queries * inputs[1][1] * hidden
    return prod(output)


def _flag(node: ir.Node, name: str) -> bool:
    return name in node.attributes and bool(node.attributes[name].as_int())


def _hint(model: ir.Model) -> str:
    """Returns what to change where a graph cannot run on the CPU."""
    import onnx_ir

    values = (value for graph in model.graphs() for node in graph for value in node.outputs)
    if any(value.dtype is onnx_ir.DataType.BFLOAT16 for value in values):
        return (
            "the model computes in bfloat16 by itself, for which the CPU has no kernels: take torch.autocast and "
            ".bfloat16() out of the model, and name the precision in the spec"
        )
    return "the node's line in the model has to be written with other operators"


def _run_exposed(model: ir.Model, case: Case) -> dict[str, AnyArray]:
    """Runs a copy of the graph whose every intermediate value is an output, as it stands (no optimisation)."""
    import onnxruntime as ort

    exposed = model.clone()
    present = {value.name for value in exposed.graph.outputs}
    for node in exposed.graph:
        for value in node.outputs:
            if value.name and value.name not in present:
                exposed.graph.outputs.append(value)
                present.add(value.name)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    with tempfile.TemporaryDirectory(prefix="modelkiln-") as work:
        write_onnx(exposed, Path(work))
        try:
            session = ort.InferenceSession(str(Path(work, MODEL_FILE)), options, providers=["CPUExecutionProvider"])
            names = [o.name for o in session.get_outputs()]
            feeds = {i.name: case.inputs[i.name] for i in session.get_inputs()}
            values = zip(names, session.run(names, feeds), strict=True)
        except Exception as error:
            raise ModelRefused(
                f"ONNX Runtime {ort.__version__} cannot run the graph: {first_line(error)}", hint=_hint(model)
            ) from error
        return {name: value for name, value in values if isinstance(value, np.ndarray)}
