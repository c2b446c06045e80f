"""Removes casts that lose nothing and are undone: onnxscript's optimizer leaves a widening and its way back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from compiler.passes.base import PassResult

if TYPE_CHECKING:
    import onnx_ir as ir

# Types that hold every value of the key. numpy's own rule calls int64 to float64 safe, which it is not.
_WIDER = {
    "FLOAT16": ("FLOAT", "DOUBLE"),
    "BFLOAT16": ("FLOAT", "DOUBLE"),
    "FLOAT": ("DOUBLE",),
    "BOOL": ("UINT8", "INT8", "INT16", "UINT16", "INT32", "UINT32", "INT64", "UINT64", "FLOAT16", "FLOAT", "DOUBLE"),
    "INT8": ("INT16", "INT32", "INT64", "FLOAT16", "FLOAT", "DOUBLE"),
    "UINT8": ("INT16", "UINT16", "INT32", "UINT32", "INT64", "UINT64", "FLOAT16", "FLOAT", "DOUBLE"),
    "INT16": ("INT32", "INT64", "FLOAT", "DOUBLE"),
    "UINT16": ("INT32", "UINT32", "INT64", "UINT64", "FLOAT", "DOUBLE"),
    "INT32": ("INT64", "DOUBLE"),
    "UINT32": ("INT64", "UINT64", "DOUBLE"),
}


def cancel_casts(model: ir.Model) -> PassResult:
    """Lets a Cast that reads a widening Cast read what that one read, and drops it where the type is then the same."""
    from onnx_ir.passes.common import RemoveUnusedNodesPass

    cancelled = 0
    for graph in model.graphs():
        for node in graph:
            source = _before_widening(node)
            if source is None:
                continue
            cancelled += 1
            node.replace_input_with(0, source)
            out = node.outputs[0]
            if source.dtype == out.dtype and not out.is_graph_output():
                out.replace_all_uses_with(source)
    if cancelled:
        RemoveUnusedNodesPass()(model)
    return PassResult(model, {"casts_cancelled": cancelled})


def _before_widening(node: ir.Node) -> ir.Value | None:
    """Returns the value that a Cast's input is a lossless widening of, or None."""
    value = node.inputs[0] if _is_cast(node) else None
    producer = value.producer() if value is not None else None
    if producer is None or not _is_cast(producer):
        return None
    source = producer.inputs[0]
    if source is None or source.dtype is None or value is None or value.dtype is None:
        return None
    return source if value.dtype.name in _WIDER.get(source.dtype.name, ()) else None


def _is_cast(node: ir.Node) -> bool:
    return node.op_type == "Cast" and node.domain in ("", "ai.onnx")
