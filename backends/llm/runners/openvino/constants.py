"""Weights as constants of an OpenVINO graph, in forms that its CPU plugin keeps compressed in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import openvino as ov
import openvino.opset15 as ops

from backends.llm.loaders.base import DenseWeight, Weight
from backends.llm.runners.openvino.forms import fit_a_byte, scales_and_zeros

if TYPE_CHECKING:
    import numpy.typing as npt


def constant(array: Any) -> ov.Node:
    """Returns a copy of a numpy array or scalar as a node; the rank stays, that of a scalar too."""
    return ov.op.Constant(np.array(array, order="C"))


def matrix(weight: Weight) -> ov.Node:
    """Returns [out, in] float32 values, which the plugin folds into the product that reads them."""
    if isinstance(weight, DenseWeight):
        return _dense(weight)
    rows, columns = weight.codes.shape
    codes, scales, zeros = scales_and_zeros(weight)
    if weight.group_size == columns and weight.bits == 8 and fit_a_byte(zeros):
        centred = ops.subtract(
            ops.convert(ov.op.Constant(_tensor(codes, ov.Type.u8)), "f32"),
            ops.convert(constant(np.rint(zeros).astype(np.uint8)), "f32"),
        )
        return ops.multiply(centred, constant(scales))
    shape = (rows, columns // weight.group_size, weight.group_size)
    stored = _packed(codes, shape) if weight.bits == 4 else _tensor(codes.reshape(shape), ov.Type.u8)
    centred = ops.subtract(ops.convert(ov.op.Constant(stored), "f32"), _zero_points(zeros))
    scaled = ops.multiply(centred, constant(scales[..., None]))
    return ops.reshape(scaled, constant(np.array([rows, columns], dtype=np.int64)), False)


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


def _zero_points(zeros: npt.NDArray[np.float32]) -> ov.Node:
    """Whole zero points are kept as bytes: only with them the plugin multiplies integers."""
    if fit_a_byte(zeros):
        return ops.convert(constant(np.rint(zeros).astype(np.uint8)[..., None]), "f32")
    return constant(zeros[..., None])
