"""Memory for a KV cache on the CPU."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

import numpy as np

from compiler.errors import UsageError

if TYPE_CHECKING:
    import numpy.typing as npt


def zeroed(num_bytes: int) -> npt.NDArray[np.uint8]:
    """Returns memory on page borders, which the system hands out as it is written to.

    Raises:
        UsageError: it is more than the system has.
    """
    try:
        return np.frombuffer(mmap.mmap(-1, num_bytes), dtype=np.uint8)
    except (OSError, OverflowError) as error:
        raise UsageError(
            f"kv_cache_bytes is too large: the system does not give {num_bytes:,} bytes for keys or values ({error})",
            hint="give the KV cache less memory",
        ) from None
