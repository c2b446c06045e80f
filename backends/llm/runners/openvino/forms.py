"""Forms of a matrix of codes that OpenVINO's integer kernels take: their zero points are whole numbers of a byte.

A file's group has a scale and a float minimum: value = scale * (code - zero), and zero is no whole number. Rounding
it moves all values of a group by up to half a step. Two forms do better:

    widened    8-bit codes, code * 17: the nearest whole zero point is at most 1/34 of a step off
    with sums  4-bit codes and a few more columns. With zero = whole - rest, a group adds
               scale * rest * (sum of its inputs) to each output: that is a product with the sums, 32 of them to a group
               of 4-bit codes of their own. The input gets the sums as more columns.

A third gives up the file's codes for one scale in each row of bytes: a byte has 17 times the steps of four bits, which
is more than what a row loses to its largest group, and nothing has to be scaled inside of a sum.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from backends.llm.loaders.base import DenseWeight, GroupedWeight, Weight
from backends.llm.models.weights import rows_of_bytes, values
from backends.llm.runners.cpu_options import WeightFormat

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float32]
    Codes = npt.NDArray[np.uint8]


def converted(weight: Weight, form: WeightFormat) -> Weight:
    """Returns a matrix in the form asked for, before matrices are put together; "u4" is made after that."""
    if form == "f32":
        return DenseWeight(values(weight))
    if form == "bf16":
        import ml_dtypes

        return DenseWeight(values(weight).astype(ml_dtypes.bfloat16))
    if form == "u8_rows":
        return rows_of_bytes(weight)
    if form == "stored" or isinstance(weight, DenseWeight) or (form == "u4" and weight.bits == 4):
        return weight
    return weight if fit_a_byte(scales_and_zeros(weight)[2]) else _widened(weight)


def scales_and_zeros(weight: GroupedWeight) -> tuple[Codes, Floats, Floats]:
    """Returns codes, scales and zero points: value = scale * (code - zero). A group of scale 0 gets code 1, zero 0."""
    flat = weight.scales == 0
    if not flat.any():
        return weight.codes, weight.scales, -weight.mins / weight.scales
    codes = np.where(np.repeat(flat, weight.group_size, axis=1), np.uint8(1), weight.codes)
    scales = np.where(flat, weight.mins, weight.scales)
    return codes, scales, np.where(flat, np.float32(0), -weight.mins / np.where(flat, np.float32(1), weight.scales))


def fit_a_byte(zeros: Floats) -> bool:
    """Whether all zero points are whole numbers of a byte, up to the rounding of their computation."""
    whole = np.rint(zeros)
    return bool(np.all((np.abs(zeros - whole) <= 1e-6 * whole) & (whole <= 255)))


def with_sums(weight: Weight) -> GroupedWeight | None:
    """Returns 4-bit codes with whole zero points and columns for the sums, or None where that form does not fit.

    The sums' columns are as many as there are groups, filled up to whole groups with codes of the value 0.
    """
    if not isinstance(weight, GroupedWeight) or weight.bits != 4:
        return None
    codes, scales, zeros = scales_and_zeros(weight)
    whole = np.rint(zeros)
    if fit_a_byte(zeros) or whole.min() < 0 or whole.max() > 255:
        return None
    rows, groups = zeros.shape
    size = weight.group_size
    rests = np.zeros((rows, -(-groups // size) * size), dtype=np.float32)
    rests[:, :groups] = (whole - zeros) * scales
    rests = rests.reshape(rows, -1, size)
    # Codes 0 .. 15 stand for -8 .. 7 steps.
    steps = np.maximum(rests.max(-1) / 7, rests.min(-1) / -8)
    steps = np.where(steps == 0, np.float32(1), steps)
    more = (np.rint(rests / steps[..., None]) + 8).clip(0, 15).astype(np.uint8).reshape(rows, -1)
    return GroupedWeight(
        codes=np.concatenate([codes, more], axis=1),
        scales=np.concatenate([scales, steps], axis=1),
        mins=np.concatenate([-scales * whole, -8 * steps], axis=1),
        bits=4,
        group_size=size,
    )


def _widened(weight: GroupedWeight) -> GroupedWeight:
    """Returns the codes spread over a byte; as they are where a zero point is outside of it."""
    codes, scales, zeros = scales_and_zeros(weight)
    factor = 255 // (2**weight.bits - 1)
    whole = np.rint(zeros * factor)
    if whole.min() < 0 or whole.max() > 255:
        return weight
    scales = scales / np.float32(factor)
    return GroupedWeight(codes * np.uint8(factor), scales, -scales * whole, bits=8, group_size=weight.group_size)
