"""Large pieces of memory: for a KV cache on the CPU, and for what kernels read and write."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

import numpy as np

from compiler.errors import UsageError

if TYPE_CHECKING:
    import numpy.typing as npt

_HUGE_PAGE = 2 << 20


def zeroed(num_bytes: int, *, huge: bool = False) -> npt.NDArray[np.uint8]:
    """Returns memory on page borders, which the system hands out as it is written to.

    Args:
        huge: in pages of 2 MiB, where the system has them: code that goes from place to place finds the page faster.

    Raises:
        UsageError: it is more than the system has.
    """
    try:
        memory = mmap.mmap(-1, num_bytes)
        if huge and num_bytes >= _HUGE_PAGE and hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        return np.frombuffer(memory, dtype=np.uint8)
    except (OSError, OverflowError) as error:
        raise UsageError(
            f"kv_cache_bytes is too large: the system does not give {num_bytes:,} bytes for keys or values ({error})",
            hint="give the KV cache less memory",
        ) from None
