"""Who opened a file: the kernel is asked (inotify), so that an open by C++ code counts as well."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_IN_ACCESS, _IN_OPEN = 0x01, 0x20
_LIBC = ctypes.CDLL(None, use_errno=True)


@contextmanager
def opens_of(path: Path) -> Iterator[list[str]]:
    """Yields a list that holds, after the block, one entry for each open or read of the file (of any in a folder)."""
    events: list[str] = []
    descriptor = _LIBC.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    assert descriptor >= 0, os.strerror(ctypes.get_errno())
    try:
        watch = _LIBC.inotify_add_watch(descriptor, os.fsencode(path), _IN_ACCESS | _IN_OPEN)
        assert watch >= 0, os.strerror(ctypes.get_errno())
        yield events
        try:
            data = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            data = b""
        while data:
            mask, length = int.from_bytes(data[4:8], "little"), int.from_bytes(data[12:16], "little")
            events.append("opened" if mask & _IN_OPEN else "read")
            data = data[16 + length :]
    finally:
        os.close(descriptor)
