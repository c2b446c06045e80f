"""Tensors as they travel: row-major, little-endian; BYTES with four bytes of length before each item. Pure."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from clients.errors import InputError
from clients.types import NUMPY_DTYPES

_LENGTH = struct.Struct("<I")


@dataclass(frozen=True)
class EncodedBytes:
    """A BYTES tensor in the form that travels: encoded once, it is sent as it is, as often as you like."""

    shape: tuple[int, ...]
    data: bytes


def encode_fixed_width(array: npt.NDArray[np.bytes_], *, keep_zeros: bool) -> EncodedBytes:
    """Encodes a numpy 'S' array, which `infer` does not take: numpy hides how many zero bytes its items end with.

    Args:
        array: of dtype 'S' and any shape.
        keep_zeros: True sends each item at the array's full width; False without the zero bytes at its end, as numpy
            shows it.

    Raises:
        InputError: it is no 'S' array.
    """
    if array.dtype.kind != "S":
        raise InputError(f"encode_fixed_width takes a numpy 'S' array, not {array.dtype}; pass others to infer itself")
    if not keep_zeros:
        return EncodedBytes(array.shape, encode_items(array.ravel().tolist()))
    width = array.dtype.itemsize
    rows = np.empty((array.size, _LENGTH.size + width), np.uint8)
    rows[:, : _LENGTH.size] = np.frombuffer(_LENGTH.pack(width), np.uint8)
    rows[:, _LENGTH.size :] = np.frombuffer(array.tobytes(), np.uint8).reshape(array.size, width)
    return EncodedBytes(array.shape, rows.tobytes())


def encode_items(items: Sequence[bytes]) -> bytes:
    """Byte strings as the contents of a BYTES tensor."""
    pieces: list[bytes] = [b""] * (2 * len(items))
    pieces[::2] = map(_LENGTH.pack, map(len, items))
    pieces[1::2] = items
    return b"".join(pieces)


def decode_items(raw: bytes) -> list[bytes]:
    """The byte strings of a BYTES tensor.

    Raises:
        ValueError: the lengths do not fit the contents.
    """
    items = []
    at, size = 0, len(raw)
    while at < size:
        if at + _LENGTH.size > size:
            raise ValueError(f"BYTES contents of {size} bytes end within a length")
        begin = at + _LENGTH.size
        at = begin + _LENGTH.unpack_from(raw, at)[0]
        items.append(raw[begin:at])
    if at != size:
        raise ValueError(f"BYTES contents of {size} bytes end within an item that would need {at}")
    return items


def encode_array(array: npt.NDArray[Any], datatype: str) -> bytes:
    """The contents of a checked array (see `clients.types.convert_value`)."""
    if datatype == "BYTES":
        return encode_items(array.ravel().tolist())
    if datatype == "BF16":
        return _bfloat16(np.ascontiguousarray(array, np.dtype("<f4")).view("<u4")).tobytes()
    return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()


def _bfloat16(bits: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint16]:
    """The upper halves of float32s, rounded to nearest even; NaN stays NaN."""
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
    return np.where(is_nan, (bits >> 16) | 0x40, rounded).astype("<u2")


def decode_array(raw: bytes | memoryview, datatype: str, shape: Sequence[int]) -> npt.NDArray[Any]:
    """An array of `shape` from contents; BYTES as objects, BF16 as float32. It may be read-only.

    Raises:
        ValueError: the contents do not fit the shape, or the datatype is unknown.
    """
    if datatype not in NUMPY_DTYPES:
        raise ValueError(f"datatype {datatype!r} is unknown; known: {', '.join(NUMPY_DTYPES)}")
    if datatype == "BYTES":
        items = decode_items(bytes(raw))
        result = np.empty(len(items), dtype=np.object_)
        result[:] = items
        return result.reshape(shape)
    if datatype == "BF16":
        return (np.frombuffer(raw, "<u2").astype("<u4") << 16).view("<f4").reshape(shape)
    return np.frombuffer(raw, NUMPY_DTYPES[datatype].newbyteorder("<")).reshape(shape)


def decode_values(raw: bytes, datatype: str) -> list[Any]:
    """The values of a tensor as Python's own, flat; BYTES as text.

    Raises:
        ValueError: the contents are no such values.
    """
    if datatype == "BYTES":
        if len(raw) >= _LENGTH.size and _LENGTH.unpack_from(raw)[0] == len(raw) - _LENGTH.size:
            return [raw[_LENGTH.size :].decode()]  # a single item, as most of a language model's are
        return [item.decode() for item in decode_items(raw)]
    values: list[Any] = decode_array(raw, datatype, (-1,)).tolist()
    return values
