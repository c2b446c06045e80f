"""What is held in memory and not needed any more: pages of mapped files, freed heap."""

from __future__ import annotations

import ctypes
from pathlib import Path

_MADV_DONTNEED = 4
_MAPS = Path("/proc/self/maps")


def release_pages(folder: Path) -> None:
    """Takes the pages of read-only mapped files below a folder out of this process's memory.

    Nothing is lost: what is read again comes from the file. After the plugin has packed its weights only rows of the
    embedding are. Does nothing where the system does not list its maps.
    """
    if not _MAPS.exists():
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    prefix = f"{folder.resolve()}/"
    for line in _MAPS.read_text(encoding="utf-8", errors="replace").splitlines():
        place, permissions, _, _, _, *name = line.split(maxsplit=5)
        if name and name[0].startswith(prefix) and "w" not in permissions:
            first, last = (int(address, 16) for address in place.split("-"))
            madvise(first, last - first, _MADV_DONTNEED)


def give_back_memory() -> None:
    """Hands freed heap back to the system, where the C library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)
