"""Computes at build time what does not depend on the inputs, and drops or merges what need not run."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from compiler.passes.base import PassResult, num_nodes

if TYPE_CHECKING:
    import onnx_ir as ir

# What onnxscript's optimizer takes away beside constants, by the operator that goes.
_MERGED = {
    "batch_normalization": "BatchNormalization",
    "cast": "Cast",
    "reshape": "Reshape",
    "transpose": "Transpose",
    "pad": "Pad",
}


def fold_constants(model: ir.Model) -> PassResult:
    """Runs onnxscript's optimizer: constants, shape arithmetic, batch normalisation into convolutions and Gemm,
    pads into convolutions, pairs of casts, reshapes and transposes, dead nodes."""
    from onnxscript import optimizer

    nodes, before = num_nodes(model), _operators(model)
    optimizer.optimize_ir(model)
    after = _operators(model)
    merged = {name: max(before[operator] - after[operator], 0) for name, operator in _MERGED.items()}
    return PassResult(model, {"nodes_removed": nodes - num_nodes(model), **merged})


def _operators(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for graph in model.graphs() for node in graph)
