"""A GGUF file's header: every count, length, dim and offset is checked before anything is allocated or read.

Our own reader, because the package `gguf` trusts the file: it maps what the header claims. Only the header is held
in memory; a tensor's bytes are read when they are asked for. What the tensors mean is not known here.

    magic, version, n_tensors, n_pairs | pairs (key, type, value) | infos (name, dims, type, offset) | pad | data
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from backends.llm.loaders.gguf_header import HeaderReader
from backends.llm.loaders.gguf_metadata import Metadata, Value
from backends.llm.loaders.gguf_types import TYPES, TensorType
from backends.llm.loaders.stored_bytes import read_bytes
from compiler.errors import ModelRefused, one_of

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

VERSIONS = (2, 3)
MAX_TENSORS = 1 << 16
MAX_PAIRS = 1 << 16
MAX_DIMS = 4
DEFAULT_ALIGNMENT = 32
MIN_ALIGNMENT, MAX_ALIGNMENT = 8, 1 << 16


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies.

    Attributes:
        shape: row-major, rows first: the reverse of the file's order, in which the first dim counts columns.
        offset: from the start of the file, in bytes.
    """

    name: str
    type: TensorType
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class GgufFile:
    """An opened file whose header was checked.

    Attributes:
        shown: how errors name it.
    """

    shown: str
    metadata: Metadata
    tensors: Mapping[str, TensorInfo]
    _file: BinaryIO

    def read(self, name: str) -> npt.NDArray[np.uint8]:
        """Returns the stored bytes of a tensor: [nbytes], a copy.

        Raises:
            ModelRefused: the file was made shorter since it was opened.
        """
        info = self.tensors[name]
        return read_bytes(self._file, info.offset, info.nbytes, f"{self.shown}: tensor '{name}'")


def open_gguf(path: Path) -> GgufFile:
    """Reads and checks the header.

    Raises:
        ModelRefused: no such file, or not a GGUF file of version 2 or 3 whose tensors all lie inside it, apart
            from each other.
    """
    try:
        file = path.open("rb")
        size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise ModelRefused(f"{path} cannot be read: {error.strerror}") from error
    reader = HeaderReader(file, size, path.name)
    count, pairs = _read_start(reader)
    metadata = _read_metadata(reader, pairs)
    alignment = metadata.integer("general.alignment", default=DEFAULT_ALIGNMENT)
    if alignment & (alignment - 1) or not MIN_ALIGNMENT <= alignment <= MAX_ALIGNMENT:
        reader.refuse(f"general.alignment is {alignment}; allowed: powers of two from 8 to {MAX_ALIGNMENT}")
    infos = [_read_info(reader, alignment) for _ in range(count)]
    start = -(-reader.position // alignment) * alignment
    tensors = {i.name: TensorInfo(i.name, i.type, i.shape, start + i.offset, i.nbytes) for i in infos}
    if len(tensors) < count:
        names = [i.name for i in infos]
        reader.refuse(f"two tensors are called '{next(n for n in names if names.count(n) > 1)}'")
    _check_places(reader, list(tensors.values()), size)
    return GgufFile(path.name, metadata, tensors, file)


def _read_start(reader: HeaderReader) -> tuple[int, int]:
    """Returns how many tensors and how many pairs follow."""
    magic = reader.raw(4, "the magic number")
    if magic != b"GGUF":
        reader.refuse(f"starts with {magic!r}; a GGUF file starts with b'GGUF'")
    version = reader.uint32("the version")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
        reader.refuse(
            f"has GGUF version {version}{' (it is big-endian)' if swapped else ''}; allowed: 2 and 3, little-endian"
        )
    count, pairs = reader.uint64("the number of tensors"), reader.uint64("the number of metadata pairs")
    for what, value, limit in (("tensors", count, MAX_TENSORS), ("metadata pairs", pairs, MAX_PAIRS)):
        if value > limit:
            reader.refuse(f"claims {value} {what}; allowed: {limit}")
    return count, pairs


def _read_metadata(reader: HeaderReader, pairs: int) -> Metadata:
    values: dict[str, Value] = {}
    for _ in range(pairs):
        key = reader.string("a metadata key")
        if key in values:
            reader.refuse(f"has the metadata key '{key}' twice")
        values[key] = reader.value(f"metadata '{key}'")
    return Metadata(reader.shown, values)


def _read_info(reader: HeaderReader, alignment: int) -> TensorInfo:
    name = reader.string("a tensor's name")
    what = f"tensor '{name}'"
    num_dims = reader.uint32(f"the number of dims of {what}")
    if not 1 <= num_dims <= MAX_DIMS:
        reader.refuse(f"{what} has {num_dims} dims; allowed: 1 to {MAX_DIMS}")
    dims = [reader.uint64(f"the dims of {what}") for _ in range(num_dims)]
    type_id = reader.uint32(f"the type of {what}")
    offset = reader.uint64(f"the offset of {what}")
    kind = TYPES.get(type_id)
    if kind is None:
        reader.refuse(f"{what} has type {type_id}; allowed: {one_of(t.name for t in TYPES.values())}")
    elements = 1
    for dim in dims:
        elements *= dim  # Python's integers: the product cannot wrap
    if not elements or dims[0] % kind.block_size:
        reader.refuse(
            f"{what} has dims {dims}; allowed for {kind.name}: none is 0, the first is a multiple of {kind.block_size}"
        )
    if offset % alignment:
        reader.refuse(f"{what} starts at {offset}, which is not a multiple of the alignment {alignment}")
    return TensorInfo(name, kind, tuple(reversed(dims)), offset, elements // kind.block_size * kind.block_bytes)


def _check_places(reader: HeaderReader, tensors: list[TensorInfo], size: int) -> None:
    """Refuses tensors that do not lie in the file, or that share bytes."""
    before: TensorInfo | None = None
    for info in sorted(tensors, key=lambda t: t.offset):
        end = info.offset + info.nbytes
        if end > size:
            reader.refuse(
                f"tensor '{info.name}' {list(info.shape)} {info.type.name} ends at byte {end}, the file at {size}",
                hint="the file is damaged or was not copied to its end",
            )
        if before and before.offset + before.nbytes > info.offset:
            reader.refuse(f"tensors '{before.name}' and '{info.name}' share bytes from {info.offset} on")
        before = info
