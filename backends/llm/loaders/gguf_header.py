"""Numbers, strings and arrays of a GGUF header, in order, with a bound on each length and on all together."""

from __future__ import annotations

import struct
from typing import BinaryIO, NoReturn, cast

import numpy as np

from backends.llm.loaders.gguf_metadata import Value
from compiler.errors import ModelRefused

# The largest vocabularies need about 10 MB and a million strings (tokens and merges).
MAX_HEADER_BYTES = 64 << 20
MAX_ELEMENTS = 1 << 22
_CHUNK = 1 << 20

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", _BOOL: "<B", 10: "<Q", 11: "<q", 12: "<d"}
_UINT64 = struct.Struct("<Q")


class HeaderReader:
    """A position in a file that grows only while what is claimed fits the file and the limits.

    Attributes:
        shown: how errors name the file.
        position: bytes read so far.
    """

    def __init__(self, file: BinaryIO, size: int, shown: str) -> None:
        self.shown = shown
        self.position = 0
        self._file = file
        self._size = size
        self._data = bytearray()  # the file from its start, as far as it was read
        self._elements = 0  # array elements so far

    def refuse(self, problem: str, hint: str = "") -> NoReturn:
        raise ModelRefused(f"{self.shown}: {problem}", hint=hint)

    def raw(self, length: int, what: str) -> bytes:
        """Returns the next bytes."""
        start = self._take(length, what)
        return bytes(self._data[start : start + length])

    def uint32(self, what: str) -> int:
        return cast(int, self._scalar("<I", what))

    def uint64(self, what: str) -> int:
        return cast(int, self._scalar("<Q", what))

    def string(self, what: str) -> str:
        return self._text(self.raw(self.uint64(f"the length of {what}"), what), what)

    def value(self, what: str) -> Value:
        """Returns the next value with its type before it: a number, a string, or an array of one of the two."""
        kind = self.uint32(f"the type of {what}")
        if kind == _STRING:
            return self.string(what)
        if kind != _ARRAY:
            return self._number(kind, what)
        kind, count = self.uint32(f"the type of {what}"), self.uint64(f"the length of {what}")
        if kind == _ARRAY:
            self.refuse(f"{what} is an array of arrays; allowed: arrays of numbers or strings")
        self._elements += count
        if self._elements > MAX_ELEMENTS:
            self.refuse(f"{what} has {count} elements; allowed: {MAX_ELEMENTS} in all arrays together")
        if kind == _STRING:
            return self._strings(count, what)
        form = self._form(kind, what)
        start = self._take(count * struct.calcsize(form), what)
        return np.frombuffer(self._data, form, count, start).copy()

    def _strings(self, count: int, what: str) -> list[str]:
        if count * _UINT64.size > self._size - self.position:
            self._too_long(count * _UINT64.size, what)
        found = []
        for _ in range(count):  # the one hot loop: half a million rounds for a large vocabulary
            length = _UINT64.unpack_from(self._data, self._take(_UINT64.size, what))[0]
            start = self._take(length, what)
            found.append(self._text(self._data[start : start + length], what))
        return found

    def _number(self, kind: int, what: str) -> int | float | bool:
        number = self._scalar(self._form(kind, what), what)
        if kind != _BOOL:
            return number
        if number not in (0, 1):
            self.refuse(f"{what} is the bool {number}; allowed: 0 and 1")
        return bool(number)

    def _form(self, kind: int, what: str) -> str:
        if kind not in _SCALARS:
            self.refuse(f"{what} has the value type {kind}; allowed: 0 to 12")
        return _SCALARS[kind]

    def _scalar(self, form: str, what: str) -> int | float:
        start = self._take(struct.calcsize(form), what)
        return cast("int | float", struct.unpack_from(form, self._data, start)[0])

    def _text(self, data: bytes | bytearray, what: str) -> str:
        try:
            return data.decode()
        except UnicodeDecodeError:
            self.refuse(f"{what} is not UTF-8: {bytes(data[:40])!r}")

    def _take(self, length: int, what: str) -> int:
        """Moves on by `length` and returns where that began; the bytes are there then."""
        start, end = self.position, self.position + length
        if end > len(self._data):
            self._load(end, length, what)
        self.position = end
        return start

    def _load(self, end: int, length: int, what: str) -> None:
        if end > min(self._size, MAX_HEADER_BYTES):
            self._too_long(length, what)
        wanted = min(max(end, len(self._data) + _CHUNK), self._size, MAX_HEADER_BYTES)
        self._data += self._file.read(wanted - len(self._data))
        if len(self._data) < end:
            self.refuse("the file changed while it was read")

    def _too_long(self, length: int, what: str) -> NoReturn:
        left = min(self._size, MAX_HEADER_BYTES) - self.position
        end = "the file" if self._size <= MAX_HEADER_BYTES else f"a header of at most {MAX_HEADER_BYTES}"
        self.refuse(f"{what} needs {length} bytes at byte {self.position}, where {end} has {left} left")
