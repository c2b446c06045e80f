"""Translations that the ONNX exporter lacks, for its custom_translation_table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from compiler.recurrent import recurrent_translation


def translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Returns what the exporter is to make of operators that it has no form of."""
    import torch

    return {torch.ops.aten.sort.stable: _stable_sort, **recurrent_translation()}


def _stable_sort(x: Any, stable: bool | None = None, dim: int = -1, descending: bool = False) -> Any:
    """Sorts with TopK over the whole axis: among equal values ONNX's takes the lower index first, so it is stable."""
    from onnxscript import opset18 as op

    axis = dim % len(x.shape)
    length = op.Shape(x, start=axis, end=axis + 1)
    return op.TopK(x, length, axis=axis, largest=int(descending), sorted=1)
