"""A safetensors file: checked by the library `safetensors`, read tensor by tensor.

The library's readers for numpy have no bfloat16, and one that maps the file dies with it when it shrinks; so the
header is read twice: once by the library, which refuses what is wrong, and once for the places.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy.typing as npt

from backends.llm.loaders.stored_bytes import plain_dtype, read_bytes
from compiler.errors import ModelRefused, one_of

DTYPES = ("BF16", "F16", "F32")


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: `offset` from the start of the file, in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class SafetensorsFile:
    """An opened file whose header was checked; `shown` is how errors name it."""

    shown: str
    tensors: Mapping[str, StoredTensor]
    _file: BinaryIO

    def read(self, name: str, allowed: Sequence[str] = DTYPES) -> npt.NDArray[Any]:
        """Returns a copy of a tensor.

        Raises:
            ModelRefused: its type is not one of those allowed, or the file was made shorter.
        """
        tensor = self.tensors[name]
        if tensor.dtype not in allowed:
            raise ModelRefused(f"{self.shown}: tensor '{name}' has the type {tensor.dtype}; allowed: {one_of(allowed)}")
        data = read_bytes(self._file, tensor.offset, tensor.nbytes, f"{self.shown}: tensor '{name}'")
        values: npt.NDArray[Any] = data.view(plain_dtype(tensor.dtype)).reshape(tensor.shape)
        return values


def open_safetensors(path: Path, shown: str) -> SafetensorsFile:
    """Reads and checks the header.

    Raises:
        ModelRefused: no such file, no safetensors file, or an empty tensor in it.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy"):
            pass
        file = path.open("rb")
    except SafetensorError as error:
        raise ModelRefused(f"{shown} is not a valid safetensors file: {error}") from error
    except OSError as error:
        raise ModelRefused(f"{shown} cannot be read: {error.strerror or error}") from error
    (length,) = struct.unpack("<Q", file.read(8))
    header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    start = 8 + length
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        if begin == end:
            raise ModelRefused(f"{shown}: tensor '{name}' has the shape {entry['shape']}; allowed: none is 0")
        tensors[name] = StoredTensor(name, entry["dtype"], tuple(entry["shape"]), start + begin, end - begin)
    return SafetensorsFile(shown, tensors, file)
