"""How near one set of outputs is to another: one number, pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from compiler.dtypes import AnyArray

Outputs = Sequence[Mapping[str, AnyArray]]


def agreement(want: Outputs, got: Outputs) -> float:
    """Returns the worst agreement over samples and outputs: 1 is equal, NaN or infinity is -1.

    Per output the smaller of two: the worst cosine between rows (the last axis), and 1 - d^2 / 2 with
    d = |got - want| / |want| over the whole array. For vectors of equal length the two are the same number, and the
    second also sees a wrong scale, which the cosine does not.
    """
    worst = 1.0
    for one, other in zip(want, got, strict=True):
        for name, expected in one.items():
            worst = min(worst, _agreement(np.asarray(expected), np.asarray(other[name])))
    return worst


def _agreement(want: AnyArray, got: AnyArray) -> float:
    if want.shape != got.shape:
        return -1.0
    if want.size == 0:
        return 1.0
    if want.dtype.kind not in "fV":
        return 1.0 - float(np.mean(want != got))
    wide, other = want.astype(np.float64), got.astype(np.float64)
    # Where fp32 itself is infinite or NaN, the same is right.
    same = np.isfinite(wide)
    if not np.isfinite(other[same]).all():
        return -1.0
    wide, other = np.where(same, wide, 0.0), np.where(same, other, 0.0)
    norm = float(np.linalg.norm(wide))
    distance = float(np.linalg.norm(other - wide))
    if norm == 0:
        return 1.0 - min(2.0, distance * distance / 2 / wide.size)
    return min(_worst_row_cosine(wide, other), 1.0 - min(2.0, (distance / norm) ** 2 / 2))


def _worst_row_cosine(want: AnyArray, got: AnyArray) -> float:
    # Short rows (two classes, one number) have no direction worth judging on their own.
    shape = (-1, want.shape[-1]) if want.ndim and want.shape[-1] >= 8 else (1, -1)
    rows_want, rows_got = want.reshape(shape), got.reshape(shape)
    lengths, other = np.linalg.norm(rows_want, axis=1), np.linalg.norm(rows_got, axis=1)
    # A row of nearly nothing among others (a padded position) is judged by the distance alone.
    judged = lengths > 1e-3 * float(lengths.max())
    dots = np.einsum("ij,ij->i", rows_want[judged], rows_got[judged])
    return float((dots / np.maximum(lengths[judged] * other[judged], 1e-300)).min())
