"""Bytes of a file as arrays, for both kinds of weight files."""

from __future__ import annotations

import os
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from compiler.errors import ModelRefused


def read_bytes(file: BinaryIO, offset: int, nbytes: int, shown: str) -> npt.NDArray[np.uint8]:
    """Returns bytes of a file: [nbytes], a copy, so that a file that changes later changes nothing.

    Args:
        shown: how errors name what lies there.

    Raises:
        ModelRefused: the file was made shorter since it was checked.
    """
    data = np.empty(nbytes, np.uint8)
    done = 0
    while done < nbytes:
        count = os.preadv(file.fileno(), [data.data[done:]], offset + done)
        if not count:
            raise ModelRefused(f"{shown} is cut off: the file changed while it was read")
        done += count
    return data


def plain_dtype(name: str) -> Any:
    """Returns numpy's type for "F32", "F16", "BF16" or "I32"."""
    if name == "BF16":
        import ml_dtypes

        return ml_dtypes.bfloat16
    return {"F32": "<f4", "F16": "<f2", "I32": "<i4"}[name]
