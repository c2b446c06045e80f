"""Weights as constants of an OpenVINO graph, in forms that its CPU plugin keeps compressed in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import openvino as ov
import openvino.opset15 as ops

from backends.llm.loaders.base import DenseWeight, GroupedWeight, Weight
from backends.llm.models.weights import values
from backends.llm.runners.openvino.options import WeightFormat

if TYPE_CHECKING:
    import numpy.typing as npt

_WIDENED = 17  # 15 * 17 = 255: a 4-bit code as an 8-bit one


def constant(array: Any) -> ov.Node:
    """Returns a copy of a numpy array or scalar as a node; the rank stays, that of a scalar too."""
    return ov.op.Constant(np.array(array, order="C"))


def matrix(weight: Weight, form: WeightFormat) -> ov.Node:
    """Returns [out, in] float32 values, which the plugin folds into the product that reads them."""
    weight = converted(weight, form)
    if isinstance(weight, DenseWeight):
        return _dense(weight)
    rows, columns = weight.codes.shape
    shape = (rows, columns // weight.group_size, weight.group_size)
    codes, scales, zeros = _scales_and_zeros(weight)
    stored = _packed(codes, shape) if weight.bits == 4 else _tensor(codes.reshape(shape), ov.Type.u8)
    centred = ops.subtract(ops.convert(ov.op.Constant(stored), "f32"), _zero_points(zeros))
    scaled = ops.multiply(centred, constant(scales[..., None]))
    return ops.reshape(scaled, constant(np.array([rows, columns], dtype=np.int64)), False)


def converted(weight: Weight, form: WeightFormat) -> Weight:
    """Returns a matrix in the form asked for; what is not there yet is computed in float32."""
    if form == "f32":
        return DenseWeight(values(weight))
    if form == "bf16":
        import ml_dtypes

        return DenseWeight(values(weight).astype(ml_dtypes.bfloat16))
    if form == "u8" and isinstance(weight, GroupedWeight) and weight.bits == 4 and not _whole_zeros(weight):
        return _widened(weight)
    return weight


def embedding_rows(weight: Weight, ids: ov.Output) -> ov.Node:
    """Returns [num_tokens, hidden] float32: the rows of the embedding, taken before they become values."""
    axis = constant(np.int32(0))
    if isinstance(weight, DenseWeight):
        return ops.convert(ops.gather(_raw(weight), ids, axis), "f32")
    rows, columns = weight.codes.shape
    codes = weight.codes.reshape(rows, -1, weight.group_size)
    taken = ops.convert(ops.gather(ov.op.Constant(_tensor(codes, ov.Type.u8)), ids, axis), "f32")
    taken = ops.multiply(taken, ops.gather(constant(weight.scales[..., None]), ids, axis))
    taken = ops.add(taken, ops.gather(constant(weight.mins[..., None]), ids, axis))
    return ops.reshape(taken, constant(np.array([-1, columns], dtype=np.int64)), False)


def _dense(weight: DenseWeight) -> ov.Node:
    raw = _raw(weight)
    return raw if raw.get_output_element_type(0) == ov.Type.f32 else ops.convert(raw, "f32")


def _raw(weight: DenseWeight) -> ov.Node:
    kinds = {"float32": ov.Type.f32, "float16": ov.Type.f16, "bfloat16": ov.Type.bf16}
    return ov.op.Constant(_tensor(weight.array, kinds[weight.array.dtype.name]))


def _tensor(array: npt.NDArray[Any], kind: ov.Type) -> ov.Tensor:
    """Returns a tensor that owns its memory. One that shares numpy's does not keep it alive."""
    tensor = ov.Tensor(kind, ov.Shape(list(array.shape)))
    np.copyto(tensor.data.view(f"u{array.dtype.itemsize}"), array.view(f"u{array.dtype.itemsize}"))
    return tensor


def _packed(codes: npt.NDArray[np.uint8], shape: tuple[int, ...]) -> ov.Tensor:
    """Returns 4-bit codes, two in a byte, the first in the low half."""
    tensor = ov.Tensor(ov.Type.u4, ov.Shape(list(shape)))
    flat = codes.reshape(-1)
    np.left_shift(flat[1::2], 4, out=tensor.data)
    np.bitwise_or(tensor.data, flat[0::2], out=tensor.data)
    return tensor


def _scales_and_zeros(
    weight: GroupedWeight,
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Returns codes, scales and zero points: value = scale * (code - zero). A group of scale 0 gets code 1, zero 0."""
    flat = weight.scales == 0
    if not flat.any():
        return weight.codes, weight.scales, -weight.mins / weight.scales
    codes = np.where(np.repeat(flat, weight.group_size, axis=1), np.uint8(1), weight.codes)
    scales = np.where(flat, weight.mins, weight.scales)
    return codes, scales, np.where(flat, np.float32(0), -weight.mins / np.where(flat, np.float32(1), weight.scales))


def _whole_zeros(weight: GroupedWeight) -> bool:
    return _fit_a_byte(_scales_and_zeros(weight)[2])


def _fit_a_byte(zeros: npt.NDArray[np.float32]) -> bool:
    return bool(np.all((zeros == np.rint(zeros)) & (zeros >= 0) & (zeros <= 255)))


def _zero_points(zeros: npt.NDArray[np.float32]) -> ov.Node:
    """Whole zero points are kept as bytes: only with them the plugin multiplies integers."""
    if _fit_a_byte(zeros):
        return ops.convert(constant(zeros.astype(np.uint8)[..., None]), "f32")
    return constant(zeros[..., None])


def _widened(weight: GroupedWeight) -> GroupedWeight:
    """Returns 4-bit codes as 8-bit ones, so that the nearest whole zero point is at most 1/34 of a step off."""
    codes, scales, zeros = _scales_and_zeros(weight)
    scales = scales / np.float32(_WIDENED)
    whole = np.clip(np.rint(zeros * _WIDENED), 0, 255).astype(np.float32)
    return GroupedWeight(codes * np.uint8(_WIDENED), scales, -scales * whole, bits=8, group_size=weight.group_size)
