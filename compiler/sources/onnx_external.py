"""External data of an ONNX file, checked before it is read: every tensor names a plain file inside the model's folder.

The checks work on the raw protobuf. What may be trusted afterwards is the list of `ExternalTensor`.
"""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compiler.errors import ModelRefused, did_you_mean, one_of

KEYS = ("location", "offset", "length", "checksum")
# Bits of one element by TensorProto.DataType; strings (8) have no fixed size and cannot be external.
ELEMENT_BITS = {
    **dict.fromkeys((14, 11, 7, 13), 64),  # complex64, double, int64, uint64
    **dict.fromkeys((1, 6, 12), 32),  # float, int32, uint32
    **dict.fromkeys((10, 16, 4, 5), 16),  # float16, bfloat16, uint16, int16
    **dict.fromkeys((2, 3, 9, 17, 18, 19, 20, 24), 8),  # uint8, int8, bool, the float8 family
    **dict.fromkeys((21, 22, 23), 4),  # uint4, int4, float4
    **dict.fromkeys((25, 26), 2),  # uint2, int2
    15: 128,  # complex128
}
# Tied weights share bytes; a file in which everything does is an attack on the memory.
MAX_SHARING = 4
MAX_DENSE_ELEMENTS = 1 << 29
_NUMBER = re.compile(r"[0-9]{1,19}")
# The messages that a tensor can be in; types and shapes are not walked.
_CONTAINERS = {
    "ModelProto",
    "GraphProto",
    "NodeProto",
    "AttributeProto",
    "FunctionProto",
    "SparseTensorProto",
    "TrainingInfoProto",
}


@dataclass(frozen=True)
class ExternalTensor:
    """A tensor whose bytes lie in another file; all numbers were checked against that file.

    Attributes:
        tensor: the TensorProto.
        shown: how errors name it.
        path: a regular file in the model's folder.
        offset: where its bytes begin.
        num_bytes: how many there are, exactly as many as its dims and type need.
    """

    tensor: Any
    shown: str
    path: Path
    offset: int
    num_bytes: int


def external_tensors(model: Any, folder: Path) -> list[ExternalTensor]:
    """Checks every tensor of the model, those of subgraphs, functions and attributes too; reads no data.

    Raises:
        ModelRefused: a tensor's data lies outside the folder or does not fit its file; the message names the tensor.
    """
    found: list[ExternalTensor] = []
    for tensor, shown in _tensors(model):
        if tensor.external_data or tensor.data_location == tensor.EXTERNAL:
            found.append(_external(tensor, shown, folder))
        elif tensor.raw_data or 0 not in tensor.dims:
            _check_inline(tensor, shown)
    _check_total(found)
    _check_sparse(model)
    return found


def _check_total(tensors: list[ExternalTensor]) -> None:
    """Refuses what would be read far more often than it is stored: a small file must not fill the memory."""
    claimed = sum(t.num_bytes for t in tensors)
    stored = sum(path.stat().st_size for path in {t.path for t in tensors})
    if claimed > MAX_SHARING * stored:
        raise ModelRefused(
            f"{len(tensors)} tensors claim {claimed} bytes of external data, and its files have {stored}: "
            f"the same bytes stand for more than {MAX_SHARING} tensors on average",
            hint="save the model again: one tensor that is used often is one initializer",
        )


def _check_sparse(model: Any) -> None:
    """Refuses sparse tensors that no memory holds once they are made dense, as ONNX Runtime makes them."""
    pending = [model]
    while pending:
        message = pending.pop()
        if message.DESCRIPTOR.name == "SparseTensorProto":
            count = math.prod(max(int(d), 0) for d in message.dims)
            if count > MAX_DENSE_ELEMENTS:
                raise ModelRefused(
                    f"the sparse tensor '{message.values.name}' has the shape {list(message.dims)}: {count} elements "
                    f"once it is dense; allowed: {MAX_DENSE_ELEMENTS}"
                )
            continue
        for descriptor, value in message.ListFields():
            if descriptor.message_type is not None and descriptor.message_type.name in _CONTAINERS:
                pending += [value] if hasattr(value, "DESCRIPTOR") else list(value)


def load_external(tensors: list[ExternalTensor]) -> None:
    """Reads the checked tensors' bytes into their protobufs.

    Raises:
        ModelRefused: a file changed since it was checked.
    """
    for item in tensors:
        try:
            # O_NOFOLLOW and the second look: the file may have been exchanged since the first.
            descriptor = os.open(item.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with os.fdopen(descriptor, "rb") as file:
                file.seek(item.offset)
                is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
                data = file.read(item.num_bytes) if is_file else b""
        except OSError as error:
            raise ModelRefused(f"{item.shown}: {item.path.name} changed while it was read: {error.strerror}") from error
        if len(data) != item.num_bytes:
            raise ModelRefused(f"{item.shown}: {item.path.name} changed while it was read")
        item.tensor.raw_data = data
        del item.tensor.external_data[:]
        item.tensor.data_location = item.tensor.DEFAULT


def _tensors(model: Any) -> Iterator[tuple[Any, str]]:
    """Yields every TensorProto and its readable name. A stack, not recursion: a file decides how deep it is."""
    pending: list[tuple[Any, str]] = [(model, "")]
    while pending:
        message, place = pending.pop()
        kind = message.DESCRIPTOR.name
        if kind == "TensorProto":
            yield message, f"tensor '{message.name}'{place}" if message.name else f"the tensor{place}"
            continue
        if kind == "NodeProto":
            place = f" of node '{message.name or message.op_type}'"
        elif kind == "AttributeProto":
            place = f" in attribute '{message.name}'{place}"
        elif kind == "FunctionProto":
            place = f" of function '{message.name}'"
        for descriptor, value in message.ListFields():
            if descriptor.message_type is None or descriptor.message_type.name not in _CONTAINERS | {"TensorProto"}:
                continue
            children = [value] if hasattr(value, "DESCRIPTOR") else list(value)
            pending += [(child, place) for child in children]


def _external(tensor: Any, shown: str, folder: Path) -> ExternalTensor:
    entries: dict[str, str] = {}
    for entry in tensor.external_data:
        if entry.key not in KEYS:
            raise ModelRefused(
                f"{shown}: unknown key {entry.key!r} in its external data{did_you_mean(entry.key, KEYS)}; "
                f"allowed: {one_of(KEYS)}"
            )
        if entry.key in entries:
            raise ModelRefused(f"{shown}: the key '{entry.key}' stands twice in its external data")
        entries[entry.key] = entry.value
    if "location" not in entries:
        raise ModelRefused(f"{shown}: its external data lacks the key 'location'")
    location = entries["location"]
    path = _inside(folder, location, shown)
    size = path.stat().st_size
    need = _num_bytes(tensor, shown)
    offset = _number(entries, "offset", shown, 0)
    length = _number(entries, "length", shown, need)
    if offset + length > size:
        raise ModelRefused(
            f"{shown}: offset {offset} + length {length} is beyond the end of {location}, which has {size} bytes",
            hint="the data file was cut, or belongs to another model",
        )
    if length != need:
        raise ModelRefused(f"{shown}: length is {length}, but its shape {list(tensor.dims)} and type need {need} bytes")
    return ExternalTensor(tensor, shown, path, offset, need)


def _number(entries: dict[str, str], key: str, shown: str, default: int) -> int:
    text = entries.get(key)
    if text is None:
        return default
    if not _NUMBER.fullmatch(text):
        raise ModelRefused(f"{shown}: {key} is {text[:40]!r}; allowed: a whole number of bytes, 0 or more")
    return int(text)


def _num_bytes(tensor: Any, shown: str) -> int:
    bits = ELEMENT_BITS.get(tensor.data_type)
    if bits is None:
        raise ModelRefused(f"{shown}: its element type {tensor.data_type} cannot be external data")
    count = 1
    for dim in tensor.dims:
        if dim < 0:
            raise ModelRefused(f"{shown}: its shape {list(tensor.dims)} has a negative size")
        count *= dim
    return -(-count * bits // 8)


def _check_inline(tensor: Any, shown: str) -> None:
    """Compares a shape with the bytes in the file, before a library allocates what the shape asks for."""
    if tensor.raw_data and tensor.data_type in ELEMENT_BITS:
        need = _num_bytes(tensor, shown)
        if len(tensor.raw_data) != need:
            raise ModelRefused(
                f"{shown}: it holds {len(tensor.raw_data)} bytes, "
                f"but its shape {list(tensor.dims)} and type need {need}"
            )


def _inside(folder: Path, location: str, shown: str) -> Path:
    """Returns the file that a location names; nothing on the way to it is a link."""
    parts = location.split("/")
    wrong = ""
    if not location or len(location) > 1024 or any(len(p) > 255 for p in parts):
        wrong = f"has {len(location)} characters"
    elif "\0" in location:
        wrong = "holds a NUL character"
    elif "\\" in location:
        wrong = "holds a backslash"
    elif location.startswith("/"):
        wrong = "is absolute"
    elif ".." in parts:
        wrong = "holds '..'"
    elif location.startswith("*/"):
        wrong = "is one of ONNX Runtime's names for memory"  # */_ORT_MEM_ADDR_/*: the offset is an address
    if wrong:
        raise ModelRefused(
            f"{shown}: the location of its external data {wrong}: {location[:80]!r}",
            hint="allowed: a file in the model's own folder, by its plain name or a path below the folder",
        )
    path = folder
    for index, part in enumerate(parts):
        path = path / part
        try:
            found = path.lstat()
        except OSError:
            raise ModelRefused(
                f"{shown}: no such file of external data: {location}", hint=f"looked for {folder / location}"
            ) from None
        is_last = index == len(parts) - 1
        if stat.S_ISLNK(found.st_mode):
            wrong = f"{'is' if is_last else 'goes through'} a symbolic link"
        elif not is_last and not stat.S_ISDIR(found.st_mode):
            wrong = f"goes through '{part}', which is not a folder"
        elif is_last and not stat.S_ISREG(found.st_mode):
            wrong = "is not a regular file"
        elif is_last and found.st_nlink > 1:
            wrong = "is a hard link: its bytes may belong to a file outside the folder"
        if wrong:
            raise ModelRefused(
                f"{shown}: its external data {location} {wrong}", hint=f"put a copy of the file into {folder}"
            )
    return path
