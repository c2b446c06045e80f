"""One table of element types: the spec's name, numpy, ONNX and Triton. No torch, no onnx import."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

AnyArray = NDArray[np.generic]


@dataclass(frozen=True)
class DType:
    """An element type under all the names it has.

    Attributes:
        name: the name used in specs (numpy's and torch's own).
        numpy: the numpy type that holds it; object for byte strings.
        onnx: the value in `onnx.TensorProto.DataType`.
        triton: the name in Triton's `model_config.proto`.
    """

    name: str
    numpy: np.dtype[np.generic]
    onnx: int
    triton: str

    @property
    def is_integer(self) -> bool:
        return bool(np.issubdtype(self.numpy, np.integer))

    @property
    def is_float(self) -> bool:
        return bool(np.issubdtype(self.numpy, np.floating))


def _dtype(name: str, numpy: object, onnx: int, triton: str) -> DType:
    return DType(name, np.dtype(numpy), onnx, triton)  # type: ignore[call-overload]


DTYPES: dict[str, DType] = {
    d.name: d
    for d in (
        _dtype("bool", np.bool_, 9, "TYPE_BOOL"),
        _dtype("uint8", np.uint8, 2, "TYPE_UINT8"),
        _dtype("uint16", np.uint16, 4, "TYPE_UINT16"),
        _dtype("uint32", np.uint32, 12, "TYPE_UINT32"),
        _dtype("uint64", np.uint64, 13, "TYPE_UINT64"),
        _dtype("int8", np.int8, 3, "TYPE_INT8"),
        _dtype("int16", np.int16, 5, "TYPE_INT16"),
        _dtype("int32", np.int32, 6, "TYPE_INT32"),
        _dtype("int64", np.int64, 7, "TYPE_INT64"),
        _dtype("float16", np.float16, 10, "TYPE_FP16"),
        _dtype("float32", np.float32, 1, "TYPE_FP32"),
        _dtype("float64", np.float64, 11, "TYPE_FP64"),
        _dtype("string", np.object_, 8, "TYPE_STRING"),
    )
}

_BY_ONNX = {d.onnx: d for d in DTYPES.values()}
_BY_TRITON = {d.triton: d for d in DTYPES.values()}


def dtype_from_onnx(element_type: int) -> DType | None:
    """Returns the dtype of an ONNX element type, or None where Triton has no such type."""
    return _BY_ONNX.get(element_type)


def dtype_from_triton(name: str) -> DType | None:
    """Returns the dtype of a Triton `TYPE_...` name, or None where it is not known."""
    return _BY_TRITON.get(name)
