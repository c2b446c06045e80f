"""Removes what the exporter wrote about the machine it ran on: stack traces, local paths, module names."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compiler.passes.base import PassResult

if TYPE_CHECKING:
    import onnx_ir as ir


def strip_metadata(model: ir.Model) -> PassResult:
    """Clears metadata and doc strings; two machines then build the same bytes."""
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass

    carrying = sum(1 for graph in model.graphs() for node in graph if node.metadata_props or node.doc_string)
    ClearMetadataAndDocStringPass()(model)
    # The pass leaves the values alone, whose metadata holds module paths.
    for graph in model.graphs():
        for value in (*graph.inputs, *graph.outputs, *graph.initializers.values()):
            value.metadata_props.clear()
        for node in graph:
            for value in node.outputs:
                value.metadata_props.clear()
    model.producer_name, model.producer_version = "modelkiln", None
    return PassResult(model, {"nodes_cleaned": carrying})
