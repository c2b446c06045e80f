"""Which nodes would leave a half type's range, judged by the fp32 values on the samples.

ONNX Runtime's CPU kernels hide this: they compute in fp32 between casts, and an engine does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from compiler.dtypes import AnyArray
from compiler.precision.graph import attribute, constant
from compiler.precision.holds import HalfType
from compiler.precision.observe import Samples, observe

if TYPE_CHECKING:
    import onnx_ir as ir

# Samples do not hold the largest value that will ever come: half of the range is left free.
HEADROOM = 2.0
# What adds up before anything divides it or takes a root: the values, or their squares.
_SUMS_OF_VALUES = frozenset({"ReduceMean", "ReduceSum", "ReduceL1", "GlobalAveragePool", "CumSum"})
_SUMS_OF_SQUARES = frozenset({"ReduceL2", "ReduceSumSquare"})


def range_holds(model: ir.Model, half: HalfType, samples: Samples) -> dict[str, str]:
    """Returns the reason by name for each node with a value, or a sum within it, beyond half of the type's range."""
    limit = half.largest / HEADROOM
    peaks, sums = _peaks(model, samples)
    holds = {}
    for node in model.graph:
        name = node.name or ""
        if sums.get(name, 0.0) > limit:
            holds[name] = f"its sums reach {sums[name]:.6g}, {half.name} ends at {half.largest:.6g}"
        for value in (*node.inputs, *node.outputs):
            peak = peaks.get(value.name or "", 0.0) if value is not None else 0.0
            if peak > limit:
                where = "gives" if value in node.outputs else "reads"
                holds[name] = f"it {where} values up to {peak:.6g}, {half.name} ends at {half.largest:.6g}"
    return holds


def _peaks(model: ir.Model, samples: Samples) -> tuple[dict[str, float], dict[str, float]]:
    """Returns the largest magnitude of each float32 value by its name, and of the sums inside reductions by node."""
    from onnx_ir import DataType

    values = [*model.graph.inputs, *(v for node in model.graph for v in node.outputs)]
    names = [v.name for v in values if v.dtype == DataType.FLOAT and v.name]
    reductions: dict[str, list[ir.Node]] = {}
    for node in model.graph:
        if node.op_type in _SUMS_OF_VALUES | _SUMS_OF_SQUARES and node.inputs[0] is not None:
            reductions.setdefault(node.inputs[0].name or "", []).append(node)
    peaks: dict[str, float] = {}
    sums: dict[str, float] = {}
    for arrays in observe(model, names, samples):
        for name, array in arrays.items():
            peaks[name] = max(peaks.get(name, 0.0), _peak(array))
            for node in reductions.get(name, ()):
                sums[node.name or ""] = max(sums.get(node.name or "", 0.0), _largest_sum(node, array))
    return peaks, sums


def _largest_sum(node: ir.Node, array: AnyArray) -> float:
    wide = np.abs(np.where(np.isfinite(array), array, 0).astype(np.float64))
    if node.op_type in _SUMS_OF_SQUARES:
        wide = wide**2
    return _peak(wide.sum(axis=_axes(node, wide.ndim)))


def _axes(node: ir.Node, rank: int) -> tuple[int, ...] | None:
    """Returns the axes that a reduction sums over; None is all of them."""
    if node.op_type == "GlobalAveragePool":
        return tuple(range(2, rank))
    axes = attribute(node, "axes", None)
    if axes is None and len(node.inputs) > 1:
        axes = constant(node.inputs[1])
    return None if axes is None else tuple(int(a) for a in np.ravel(axes))  # type: ignore[call-overload]


def _peak(array: AnyArray) -> float:
    # Infinity in fp32 (a mask of -inf) is infinity in any type, and no reason to hold a node.
    finite = array[np.isfinite(array)] if np.ndim(array) else np.ravel(array)
    return float(np.abs(finite).max()) if finite.size else 0.0
