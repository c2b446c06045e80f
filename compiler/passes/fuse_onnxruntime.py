"""Fuses patterns into the operators that ONNX Runtime has kernels for (com.microsoft).

Only for the onnxruntime target: TensorRT's parser knows almost none of these operators.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from compiler.passes.base import PassResult

if TYPE_CHECKING:
    import onnx_ir as ir

# What each count of onnxscript's fusions means to a user; several of its rules are steps of one fusion.
_FUSIONS = {
    "attention": ("mha1", "mha2", "attention", "sdpa_via_mha"),
    "group_query_attention": ("gqa",),
    "skip_layer_normalization": ("skip_layer_normalization",),
    "skip_rms_normalization": ("skip_rms_normalization",),
    "rms_normalization": ("rms_normalization",),
    "rotary_embedding": ("rotary_embedding", "partial_rotary_embedding"),
    "gelu": ("erf_gelu", "gelu"),
    "bias_gelu": ("bias_gelu",),
}


def fuse_onnxruntime(model: ir.Model) -> PassResult:
    """Applies onnxscript's fusions for ONNX Runtime and reports each kind's count."""
    from onnxscript.rewriter.ort_fusions import optimize_for_ort

    had_attention = any(node.op_type == "Softmax" for node in model.graph)
    model, applied = optimize_for_ort(model)
    counts = {name: sum(applied.get(rule, 0) for rule in rules) for name, rules in _FUSIONS.items()}
    # The sdpa rule's result is a step on the way; one left over was inlined again.
    notes: tuple[str, ...] = ()
    if had_attention and not counts["attention"] and not counts["group_query_attention"]:
        notes = ("a Softmax was found, but no attention fusion matched",)
    return PassResult(model, counts, notes)
