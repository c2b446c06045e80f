"""Weights before they become a runner's: values of codes, and matrices that read the same input put together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from backends.llm.loaders.base import DenseWeight, GroupedWeight, Weight

if TYPE_CHECKING:
    import numpy.typing as npt


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
