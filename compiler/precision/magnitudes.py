"""Which nodes would leave a half type's range, judged by the fp32 values on the samples.

ONNX Runtime's CPU kernels hide this: they compute in fp32 between casts, and an engine does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
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
# They divide each row by the root of its variance, or of its mean square.
_WITHOUT_MEAN = frozenset({"RMSNormalization", "SimplifiedLayerNormalization"})
_NORMALISATIONS = frozenset({"LayerNormalization"}) | _WITHOUT_MEAN


@dataclass(frozen=True)
class ObservedRanges:
    """What the values on the samples say.

    Attributes:
        holds: the reason by name for each node with a value, or a sum within it, beyond half of the type's range.
        harmless_epsilons: normalisations whose epsilon is 0 in the type and makes no difference on the samples.
        notes: sentences for the report.
    """

    holds: dict[str, str]
    harmless_epsilons: frozenset[str]
    notes: tuple[str, ...]


class _Observed:
    """Largest magnitudes by value; by node its largest sum and its smallest variance."""

    def __init__(self) -> None:
        self.peaks: dict[str, float] = {}
        self.sums: dict[str, float] = {}
        self.variances: dict[str, float] = {}

    def add(self, name: str, array: AnyArray, readers: Sequence[ir.Node]) -> None:
        self.peaks[name] = max(self.peaks.get(name, 0.0), _peak(array))
        for node in readers:
            key = node.name or ""
            if node.op_type in _NORMALISATIONS:
                total, variance = _moments(node, array)
                self.variances[key] = min(self.variances.get(key, np.inf), variance)
            else:
                total = _largest_sum(node, array)
            self.sums[key] = max(self.sums.get(key, 0.0), total)


def observe_ranges(model: ir.Model, half: HalfType, samples: Samples) -> ObservedRanges:
    """Runs the graph on the samples and judges each node by the values that it reads, forms and gives."""
    from onnx_ir import DataType

    values = [*model.graph.inputs, *(v for node in model.graph for v in node.outputs)]
    names = [v.name for v in values if v.dtype == DataType.FLOAT and v.name]
    readers: dict[str, list[ir.Node]] = {}
    for node in model.graph:
        if node.op_type in _SUMS_OF_VALUES | _SUMS_OF_SQUARES | _NORMALISATIONS and node.inputs[0] is not None:
            readers.setdefault(node.inputs[0].name or "", []).append(node)
    seen = _Observed()
    for arrays in observe(model, names, samples):
        for name, array in arrays.items():
            seen.add(name, array, readers.get(name, ()))
    harmless = _harmless_epsilons(model, half, seen.variances)
    notes: tuple[str, ...] = ()
    if harmless:
        smallest = min(seen.variances[n] for n in harmless)
        notes = (
            f"the epsilon of {len(harmless)} normalisation(s) is 0 in {half.name} and makes no difference: "
            f"the smallest variance on the samples is {smallest:.3g}",
        )
    return ObservedRanges(_holds(model, half, seen), harmless, notes)


def _holds(model: ir.Model, half: HalfType, seen: _Observed) -> dict[str, str]:
    limit = half.largest / HEADROOM
    holds = {}
    for node in model.graph:
        name = node.name or ""
        if seen.sums.get(name, 0.0) > limit:
            holds[name] = f"its sums reach {seen.sums[name]:.6g}, {half.name} ends at {half.largest:.6g}"
        for value in (*node.inputs, *node.outputs):
            peak = seen.peaks.get(value.name or "", 0.0) if value is not None else 0.0
            if peak > limit:
                where = "gives" if value in node.outputs else "reads"
                holds[name] = f"it {where} values up to {peak:.6g}, {half.name} ends at {half.largest:.6g}"
    return holds


def _harmless_epsilons(model: ir.Model, half: HalfType, variances: Mapping[str, float]) -> frozenset[str]:
    """Returns the normalisations that divide by a variance which the type holds in full, twice over."""
    epsilons = {n.name or "": attribute(n, "epsilon", None) for n in model.graph if n.name in variances}
    return frozenset(
        name
        for name, epsilon in epsilons.items()
        if isinstance(epsilon, float) and 0 < epsilon < half.tiny and variances[name] >= HEADROOM * half.normal
    )


def _moments(node: ir.Node, array: AnyArray) -> tuple[float, float]:
    """Returns the largest sum of squared distances from a row's mean, and the smallest variance of a row."""
    if not array.size:
        return 0.0, np.inf
    axis = int(str(attribute(node, "axis", -1)))
    axes = tuple(range(axis % array.ndim, array.ndim))
    wide = np.where(np.isfinite(array), array, 0).astype(np.float64)
    mean = 0.0 if node.op_type in _WITHOUT_MEAN else wide.mean(axis=axes, keepdims=True)
    sums = ((wide - mean) ** 2).sum(axis=axes)
    return float(sums.max()), float(sums.min()) / prod(array.shape[a] for a in axes)


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
