"""Merges nodes that compute the same value and small initializers that hold the same bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compiler.passes.base import PassResult, num_nodes

if TYPE_CHECKING:
    import onnx_ir as ir


def deduplicate(model: ir.Model) -> PassResult:
    """Removes common subexpressions and duplicate initializers."""
    from onnx_ir.passes.common import (
        CommonSubexpressionEliminationPass,
        DeduplicateInitializersPass,
        RemoveUnusedNodesPass,
    )

    nodes, initializers = num_nodes(model), len(model.graph.initializers)
    CommonSubexpressionEliminationPass()(model)
    # Up to its default limit of 1,024 elements. The pass for large ones fails on weights that constant
    # folding transposed (onnx-ir 1.1.0: "ndarray is not C-contiguous").
    DeduplicateInitializersPass()(model)
    RemoveUnusedNodesPass()(model)
    return PassResult(
        model,
        {
            "nodes_merged": nodes - num_nodes(model),
            "initializers_merged": initializers - len(model.graph.initializers),
        },
    )
