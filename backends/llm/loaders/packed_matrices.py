"""Matrices of AWQ and GPTQ checkpoints, codes packed into int32 words, as the GroupedWeight that they stand for.

A matrix "X.weight" of [out, in] is stored as several tensors, all transposed:

    X.qweight  GPTQ: [in * bits / 32, out], a word holds neighbours of one column, the first in the lowest bits
               AWQ:  [in, out * bits / 32], a word holds neighbours of one row, in the order 0 2 4 6 1 3 5 7
    X.qzeros   [groups, out * bits / 32], packed like a row; GPTQ's first format stores each zero point minus one
    X.scales   [groups, out]
    X.g_idx    GPTQ: [in], the group of each input; not i // group_size where it was quantised in another order

value[o, i] = scales[g, o] * (code[i, o] - zero[g, o])
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from backends.llm.loaders.base import DenseWeight, GroupedWeight, Weight
from backends.llm.loaders.safetensors_file import DTYPES, StoredTensor
from compiler.errors import ModelRefused, one_of

if TYPE_CHECKING:
    import numpy.typing as npt

    Codes = npt.NDArray[np.uint8]

KEY = "quantization_config"
# The tensors of a packed matrix, and the types that they may have.
PARTS = {"qweight": ("I32",), "qzeros": ("I32",), "scales": DTYPES, "g_idx": ("I32",)}
_WORD_BITS = 32
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_BITS = {"gptq": (2, 4, 8), "awq": (4,)}


@dataclass(frozen=True)
class Packing:
    """How a folder's matrices are packed.

    Attributes:
        method: "gptq" or "awq".
        zero_offset: what is added to a stored zero point.
    """

    method: str
    bits: int
    zero_offset: int

    @property
    def per_word(self) -> int:
        return _WORD_BITS // self.bits

    @property
    def shown(self) -> str:
        return f"{self.method.upper()} {self.bits} bits"


def packing_of(config: Mapping[str, Any], shown: str) -> Packing | None:
    """Returns how the matrices of a config.json's model are packed; None where they are plain tensors.

    Raises:
        ModelRefused: another method or layout of quantised weights.
    """
    if config.get(KEY) is None:
        return None
    keys = config[KEY] if isinstance(config[KEY], dict) else {}
    method, bits = keys.get("quant_method"), keys.get("bits")
    if not isinstance(method, str) or method not in _BITS:
        raise ModelRefused(
            f"{shown}: '{KEY}' has the quant_method {str(method)[:40]!r}; allowed: {one_of(_BITS)}",
            hint="use the folder of the model before it was quantised",
        )
    if type(bits) is not int or bits not in _BITS[method]:
        raise ModelRefused(f"{shown}: '{KEY}' has {str(bits)[:40]} bits; {method} is read with: {_BITS[method]}")
    # What else the packers write lays the same bits out otherwise.
    layout, wanted = ("version", ("gemm",)) if method == "awq" else ("checkpoint_format", ("gptq", "gptq_v2"))
    found = str(keys.get(layout) or wanted[0]).lower()
    if found not in wanted:
        raise ModelRefused(f"{shown}: '{KEY}' has the {layout} {found[:40]!r}; allowed: {one_of(wanted)}")
    return Packing(method, bits, zero_offset=int(method == "gptq" and found == "gptq"))


def packed_shape(packing: Packing, parts: Mapping[str, StoredTensor], name: str) -> tuple[int, int]:
    """Returns [out, in] of a packed matrix.

    Args:
        parts: its tensors by "qweight", "qzeros", "scales", "g_idx".
        name: how errors name it.

    Raises:
        ModelRefused: a part is missing, or the parts do not fit each other.
    """
    missing = [part for part in ("qweight", "qzeros", "scales") if part not in parts]
    if missing:
        raise ModelRefused(f"{name} is packed, and lacks: {', '.join(missing)}")
    words, zeros, scales = (parts[part].shape for part in ("qweight", "qzeros", "scales"))
    if not len(words) == len(zeros) == len(scales) == 2:
        raise ModelRefused(
            f"{name} has qweight {list(words)}, qzeros {list(zeros)}, scales {list(scales)}; wanted: 2-d"
        )
    rows, columns = words[1], words[0]
    if packing.method == "awq":
        rows *= packing.per_word
    else:
        columns *= packing.per_word
    groups = scales[0]
    if columns % groups or scales[1] != rows or zeros != (groups, rows // packing.per_word) or rows % packing.per_word:
        raise ModelRefused(
            f"{name} has scales {list(scales)} and qzeros {list(zeros)}; a matrix of [{rows}, {columns}] with {groups} "
            f"groups that divide it has [{groups}, {rows}] and [{groups}, {rows // packing.per_word}]"
        )
    if "g_idx" in parts and parts["g_idx"].shape != (columns,):
        raise ModelRefused(f"{name} has g_idx {list(parts['g_idx'].shape)}; wanted: [{columns}]")
    return rows, columns


def unpack(packing: Packing, read: Callable[[str], npt.NDArray[Any]], parts: Mapping[str, StoredTensor]) -> Weight:
    """Returns the codes, or the values in float32 where groups are not neighbours.

    Args:
        read: a stored tensor by its part, of the shapes that `packed_shape` checked.

    Raises:
        ModelRefused: `g_idx` names a group that is not there.
    """
    codes = _unpacked(read("qweight"), packing, along_rows=packing.method == "awq").T
    scales = np.ascontiguousarray(read("scales").astype(np.float32).T)
    stored = _unpacked(read("qzeros"), packing, along_rows=True).T
    zeros = ((stored + np.uint8(packing.zero_offset)) & np.uint8(2**packing.bits - 1)).astype(np.float32)
    groups = scales.shape[1]
    size = codes.shape[1] // groups
    if "g_idx" in parts:
        order = read("g_idx")
        if not np.array_equal(order, np.arange(codes.shape[1]) // size):
            if order.min() < 0 or order.max() >= groups:
                raise ModelRefused(f"'{parts['g_idx'].name}' names group {order.max()}; there are {groups}, from 0")
            return DenseWeight(scales[:, order] * (codes.astype(np.float32) - zeros[:, order]))
    return GroupedWeight(np.ascontiguousarray(codes), scales, -scales * zeros, bits=packing.bits, group_size=size)


def _unpacked(words: npt.NDArray[Any], packing: Packing, *, along_rows: bool) -> Codes:
    """Returns the codes of int32 words: [rows, columns * per_word], or [rows * per_word, columns]."""
    shifts = np.arange(packing.per_word, dtype=np.uint32) * np.uint32(packing.bits)
    if packing.method == "awq":
        shifts = shifts[np.argsort(_AWQ_ORDER)]
    rows, columns = words.shape
    axis = 2 if along_rows else 1
    spread = np.expand_dims(words.view(np.uint32), axis) >> (shifts if along_rows else shifts[:, None])
    codes = (spread & np.uint32(2**packing.bits - 1)).astype(np.uint8)
    return codes.reshape((rows, -1) if along_rows else (-1, columns))
