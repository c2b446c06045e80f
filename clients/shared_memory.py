"""Tensors in system shared memory, which a server on the same host reads and writes in place."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt


@dataclass(frozen=True, eq=False)
class SharedTensor:
    """A tensor that lies in a region which the server knows: an input, or the place for an output.

    Attributes:
        region: the region's name on the server.
        offset: bytes from the region's begin.
        array: the tensor itself; what is written into it is in the region.
    """

    region: str
    offset: int
    datatype: str
    array: npt.NDArray[Any] = field(repr=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def byte_size(self) -> int:
        return self.array.nbytes

    def view(self, shape: tuple[int, ...]) -> npt.NDArray[Any]:
        """What the server wrote, which may be smaller than the place for it."""
        return self.array.reshape(-1)[: math.prod(shape)].reshape(shape)
