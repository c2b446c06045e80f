"""Weights before they become a runner's: values of codes, and matrices that read the same input put together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from backends.llm.loaders.base import DenseWeight, GroupedWeight, Weight

if TYPE_CHECKING:
    import numpy.typing as npt

_ROWS_AT_ONCE = 2048


def values(weight: Weight) -> npt.NDArray[np.float32]:
    """Returns a weight in float32, in its own shape."""
    if isinstance(weight, DenseWeight):
        return np.asarray(weight.array, dtype=np.float32)
    rows, columns = weight.codes.shape
    grouped = weight.codes.reshape(rows, -1, weight.group_size).astype(np.float32)
    grouped *= weight.scales[..., None]
    grouped += weight.mins[..., None]
    return grouped.reshape(rows, columns)


def stack(weights: Sequence[Weight]) -> Weight | None:
    """Returns the rows of several matrices as one, or None where they are not stored alike."""
    if all(isinstance(w, DenseWeight) for w in weights):
        dense: list[npt.NDArray[Any]] = [w.array for w in weights if isinstance(w, DenseWeight)]
        return DenseWeight(np.concatenate(dense)) if len({a.dtype for a in dense}) == 1 else None
    grouped = [w for w in weights if isinstance(w, GroupedWeight)]
    if len(grouped) < len(weights) or len({(w.bits, w.group_size) for w in grouped}) > 1:
        return None
    return GroupedWeight(
        codes=np.concatenate([w.codes for w in grouped]),
        scales=np.concatenate([w.scales for w in grouped]),
        mins=np.concatenate([w.mins for w in grouped]),
        bits=grouped[0].bits,
        group_size=grouped[0].group_size,
    )


def rows_of_bytes(weight: Weight) -> GroupedWeight:
    """Returns a matrix as bytes with a scale and a whole zero point for each row; 0 is a value of every row."""
    rows, columns = weight.array.shape if isinstance(weight, DenseWeight) else weight.codes.shape
    codes = np.empty((rows, columns), dtype=np.uint8)
    scales, zeros = (np.empty((rows, 1), dtype=np.float32) for _ in range(2))
    # Some rows at a time: several float32 copies of a whole head would be ten times what is kept.
    for first in range(0, rows, _ROWS_AT_ONCE):
        some = slice(first, first + _ROWS_AT_ONCE)
        wide = values(_rows(weight, some))
        low, high = np.minimum(wide.min(1, keepdims=True), 0), np.maximum(wide.max(1, keepdims=True), 0)
        steps = (high - low) / np.float32(255)
        scales[some] = np.where(steps == 0, np.float32(1), steps)
        zeros[some] = np.rint(-low / scales[some]).clip(0, 255)
        codes[some] = (np.rint(wide / scales[some]) + zeros[some]).clip(0, 255)
    return GroupedWeight(codes, scales, -scales * zeros, bits=8, group_size=columns)


def _rows(weight: Weight, some: slice) -> Weight:
    if isinstance(weight, DenseWeight):
        return DenseWeight(weight.array[some])
    return replace(weight, codes=weight.codes[some], scales=weight.scales[some], mins=weight.mins[some])
