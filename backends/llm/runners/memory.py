"""Large pieces of memory, and what is held in memory and not needed any more: pages of mapped files, freed heap."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from compiler.errors import UsageError

if TYPE_CHECKING:
    import numpy.typing as npt

_MADV_DONTNEED = 4
_MAPS = Path("/proc/self/maps")


def zeroed(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Returns memory on page borders, which the system hands out as it is written to.

    Raises:
        UsageError: it is more than the system has.
    """
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise UsageError(
            f"kv_cache_bytes is too large: the system does not give {num_bytes:,} bytes for keys or values ({error})",
            hint="give the KV cache less memory",
        ) from None
    return np.frombuffer(memory, dtype=np.uint8)


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
