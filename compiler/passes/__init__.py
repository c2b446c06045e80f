"""The ordered list of graph passes for each target, with the reasons for the order."""

from __future__ import annotations

from compiler.passes.base import Pass, PassResult, num_nodes
from compiler.passes.cancel_casts import cancel_casts
from compiler.passes.deduplicate import deduplicate
from compiler.passes.fold_constants import fold_constants
from compiler.passes.fuse_onnxruntime import fuse_onnxruntime
from compiler.passes.merge_products import merge_products
from compiler.passes.prune_inputs import prune_inputs
from compiler.passes.strip_metadata import strip_metadata

__all__ = ["Pass", "PassResult", "num_nodes", "passes_for"]

_COMMON = (
    # First: later passes copy metadata onto the nodes they make.
    Pass("strip_metadata", strip_metadata, verify=False),
    # Before the fusions: their patterns are written for folded graphs.
    Pass("fold_constants", fold_constants),
    # After folding, which gives every value the type that is compared.
    Pass("cancel_casts", cancel_casts),
    # After folding, which is what turns equal values into equal nodes.
    Pass("deduplicate", deduplicate),
    # After dead code is gone: a use in dead code is no use.
    Pass("prune_inputs", prune_inputs, verify=False),
)

_FOR_TARGET = {
    "onnxruntime": (
        *_COMMON,
        Pass("fuse_onnxruntime", fuse_onnxruntime, stage="fuse"),
        # After the fusions, whose patterns want the products apart, and after int8, which judges each by itself.
        Pass("merge_products", merge_products, stage="last"),
    ),
    # OpenVINO fuses by itself when it compiles, and knows few of ONNX Runtime's operators. Merged products are no
    # faster there, and slower in fp32 at short sequences (docs/measured.md).
    "openvino": _COMMON,
    # No fusions: their parser knows almost none of com.microsoft, and the builder fuses and merges by itself. Folding
    # is what makes the parser take a Pad, Clip or Reshape whose argument is computed.
    "tensorrt": _COMMON,
    "tensorrt-rtx": _COMMON,
}


def passes_for(target: str) -> tuple[Pass, ...]:
    """Returns the passes that run for a target, in order."""
    return _FOR_TARGET[target]
