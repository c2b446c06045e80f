"""Computes at build time what does not depend on the inputs, and drops what nothing reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compiler.passes.base import PassResult, num_nodes

if TYPE_CHECKING:
    import onnx_ir as ir


def fold_constants(model: ir.Model) -> PassResult:
    """Folds constants, simplifies shape arithmetic and removes dead nodes, with onnxscript's optimizer."""
    from onnxscript import optimizer

    before = num_nodes(model)
    optimizer.optimize_ir(model)
    return PassResult(model, {"nodes_removed": before - num_nodes(model)})
