"""The block formats of GGUF, unpacked: integer codes, a scale and sometimes a minimum for each group of them.

All of them are value = scale * (code - zero_point) + min; what differs is how codes and scales are packed. Layouts:
ggml-common.h and ggml-quants.c of ggml; the result is bit for bit that of the package `gguf` (tests).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from backends.llm.loaders.base import DenseWeight, GroupedWeight, Weight
from backends.llm.loaders.gguf_types import TensorType
from backends.llm.loaders.stored_bytes import plain_dtype

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]
# Blocks unpacked at once: what is needed besides the result stays below about 100 MB.
_BLOCKS_AT_ONCE = 1 << 19


@dataclass(frozen=True)
class Unpacked:
    """Some blocks.

    Attributes:
        codes: [num_blocks, block_size].
        scales: [num_blocks, groups].
        mins: [num_blocks, groups], or None where the format has none.
    """

    codes: Bytes
    scales: Floats
    mins: Floats | None = None


@dataclass(frozen=True)
class Format:
    """A block format.

    Attributes:
        unpack: from bytes [num_blocks, block_bytes].
        groups: in one block.
        exact_groups: scale * code + (min - zero_point * scale) rounds as scale * (code - zero_point) + min does:
            the products fit the 24 bits of a float32. Q6_K's do not (11 + 8 + 6 bits).
    """

    unpack: Callable[[Bytes], Unpacked]
    bits: int
    groups: int
    zero_point: int = 0
    exact_groups: bool = True


def dequantize(data: Bytes, kind: TensorType, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    """Returns the values of a tensor's bytes: float32, or the type they are stored in where they are plain numbers."""
    if kind.name in _PLAIN:
        plain: npt.NDArray[Any] = data.view(plain_dtype(kind.name))
        return plain.reshape(shape)
    form = FORMATS[kind.name]
    blocks = data.reshape(-1, kind.block_bytes)
    values = np.empty((len(blocks), form.groups, kind.block_size // form.groups), np.float32)
    with np.errstate(all="ignore"):  # a damaged scale may be infinite
        for start in range(0, len(blocks), _BLOCKS_AT_ONCE):
            part = form.unpack(blocks[start : start + _BLOCKS_AT_ONCE])
            out = values[start : start + _BLOCKS_AT_ONCE]
            out[...] = part.codes.reshape(out.shape)
            out -= np.float32(form.zero_point)
            out *= part.scales[..., None]
            if part.mins is not None:
                out += part.mins[..., None]
    return values.reshape(shape)


def weight_from_bytes(data: Bytes, kind: TensorType, shape: tuple[int, ...]) -> Weight:
    """Returns a weight in the form nearest to the file's: groups of codes where their formula is exact in float32."""
    form = FORMATS.get(kind.name)
    if form is None or not form.exact_groups or len(shape) != 2:
        return DenseWeight(dequantize(data, kind, shape))
    blocks = data.reshape(-1, kind.block_bytes)
    codes = np.empty((len(blocks), kind.block_size), np.uint8)
    scales = np.empty((len(blocks), form.groups), np.float32)
    mins = np.empty_like(scales)
    for start in range(0, len(blocks), _BLOCKS_AT_ONCE):
        chunk = slice(start, start + _BLOCKS_AT_ONCE)
        part = form.unpack(blocks[chunk])
        codes[chunk], scales[chunk] = part.codes, part.scales
        mins[chunk] = np.float32(-form.zero_point) * part.scales if part.mins is None else part.mins
    group_size = kind.block_size // form.groups
    columns = shape[1] // group_size
    return GroupedWeight(
        codes.reshape(shape),
        scales.reshape(shape[0], columns),
        mins.reshape(shape[0], columns),
        bits=form.bits,
        group_size=group_size,
    )


_PLAIN = ("F32", "F16", "BF16")


def _half(data: Bytes) -> Floats:
    """Returns float16 numbers [num_blocks, n] from their bytes [num_blocks, 2 * n]."""
    return np.ascontiguousarray(data).view("<f2").astype(np.float32)


def _planes(data: Bytes, lanes: int, bits: int) -> Bytes:
    """Returns the codes of `bits` bits each: of every `lanes` bytes first all lowest parts, then the next ones."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    parts = (data.reshape(len(data), -1, 1, lanes) >> shifts) & np.uint8((1 << bits) - 1)
    return parts.reshape(len(data), -1)


def _q4_0(b: Bytes) -> Unpacked:
    return Unpacked(_planes(b[:, 2:], 16, 4), _half(b[:, :2]))


def _q4_1(b: Bytes) -> Unpacked:
    return Unpacked(_planes(b[:, 4:], 16, 4), _half(b[:, :2]), _half(b[:, 2:4]))


def _fifth_bits(data: Bytes) -> Bytes:
    return np.unpackbits(data, axis=1, bitorder="little") << np.uint8(4)


def _q5_0(b: Bytes) -> Unpacked:
    return Unpacked(_planes(b[:, 6:], 16, 4) | _fifth_bits(b[:, 2:6]), _half(b[:, :2]))


def _q5_1(b: Bytes) -> Unpacked:
    codes = _planes(b[:, 8:], 16, 4) | _fifth_bits(b[:, 4:8])
    return Unpacked(codes, _half(b[:, :2]), _half(b[:, 2:4]))


def _q8_0(b: Bytes) -> Unpacked:
    return Unpacked(b[:, 2:] ^ np.uint8(0x80), _half(b[:, :2]))  # int8 + 128 is the sign bit flipped


def _q2_k(b: Bytes) -> Unpacked:
    scales, mins = b[:, :16] & np.uint8(15), b[:, :16] >> np.uint8(4)
    return Unpacked(_planes(b[:, 16:80], 32, 2), _half(b[:, 80:82]) * scales, -_half(b[:, 82:84]) * mins)


def _q3_k(b: Bytes) -> Unpacked:
    codes = _planes(b[:, 32:96], 32, 2) | _planes(b[:, :32], 32, 1) << np.uint8(2)
    # 16 scales of 6 bits: the low four in bytes 0-7, the high two in bytes 8-11.
    packed = _planes(b[:, 96:104], 8, 4) | _planes(b[:, 104:108], 4, 2) << np.uint8(4)
    return Unpacked(codes, _half(b[:, 108:110]) * (packed.astype(np.int8) - np.int8(32)))


def _scales_and_mins(b: Bytes) -> tuple[Bytes, Bytes]:
    """Returns 8 scales and 8 minima of 6 bits each from the 12 bytes of Q4_K and Q5_K."""
    low, mid, high = b[:, :4], b[:, 4:8], b[:, 8:]
    top = np.uint8(0x30)
    scales = np.concatenate([low & np.uint8(63), (high & np.uint8(15)) | ((low >> np.uint8(2)) & top)], axis=1)
    mins = np.concatenate([mid & np.uint8(63), (high >> np.uint8(4)) | ((mid >> np.uint8(2)) & top)], axis=1)
    return scales, mins


def _q4_k(b: Bytes) -> Unpacked:
    scales, mins = _scales_and_mins(b[:, 4:16])
    return Unpacked(_planes(b[:, 16:], 32, 4), _half(b[:, :2]) * scales, -_half(b[:, 2:4]) * mins)


def _q5_k(b: Bytes) -> Unpacked:
    scales, mins = _scales_and_mins(b[:, 4:16])
    codes = _planes(b[:, 48:], 32, 4) | _planes(b[:, 16:48], 32, 1) << np.uint8(4)
    return Unpacked(codes, _half(b[:, :2]) * scales, -_half(b[:, 2:4]) * mins)


def _q6_k(b: Bytes) -> Unpacked:
    codes = _planes(b[:, :128], 64, 4) | _planes(b[:, 128:192], 32, 2) << np.uint8(4)
    return Unpacked(codes, _half(b[:, 208:210]) * np.ascontiguousarray(b[:, 192:208]).view(np.int8))


FORMATS = {
    "Q4_0": Format(_q4_0, bits=4, groups=1, zero_point=8),
    "Q4_1": Format(_q4_1, bits=4, groups=1),
    "Q5_0": Format(_q5_0, bits=5, groups=1, zero_point=16),
    "Q5_1": Format(_q5_1, bits=5, groups=1),
    "Q8_0": Format(_q8_0, bits=8, groups=1, zero_point=128),
    "Q2_K": Format(_q2_k, bits=2, groups=16),
    "Q3_K": Format(_q3_k, bits=3, groups=16, zero_point=4),
    "Q4_K": Format(_q4_k, bits=4, groups=8),
    "Q5_K": Format(_q5_k, bits=5, groups=8),
    "Q6_K": Format(_q6_k, bits=6, groups=16, zero_point=32, exact_groups=False),
}
