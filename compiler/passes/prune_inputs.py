"""Removes graph inputs that no output depends on: Triton would ask every client to send them for nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compiler.passes.base import PassResult

if TYPE_CHECKING:
    import onnx_ir as ir


def prune_inputs(model: ir.Model) -> PassResult:
    """Drops unused inputs; runs after dead code is gone, so that a use in dead code does not count."""
    unused = [v for v in model.graph.inputs if not v.uses() and v not in model.graph.outputs]
    for value in unused:
        model.graph.inputs.remove(value)
    notes = tuple(f"input '{v.name}' was pruned: no output depends on it" for v in unused)
    return PassResult(model, {"inputs_pruned": len(unused)}, notes)
