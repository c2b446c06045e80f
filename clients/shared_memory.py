"""Tensors in system shared memory, which a server on the same host reads and writes in place."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from clients.errors import ClientError, InputError, ServerError, SharedMemoryError
from clients.types import NUMPY_DTYPES

_FOLDER = Path("/dev/shm")
_ALIGNMENT = 64
# The server keeps a region in use for a moment after it has answered: waits before it is asked again, 4 s in all.
UNREGISTER_WAITS_S = tuple(0.001 * 2**turn for turn in range(12))
_DATATYPES = {dtype: name for name, dtype in NUMPY_DTYPES.items() if name not in ("BF16", "BYTES")}


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


class SharedBlock:
    """Memory under a name, in which tensors are laid one after the other; whoever makes it unlinks it.

    Args:
        byte_size: bytes for all tensors together, each rounded up to 64.

    Raises:
        SharedMemoryError: there is no room for it, or no shared memory at all.
    """

    def __init__(self, byte_size: int) -> None:
        # Named as `compile serve` names its own: the next one removes what a killed process has left.
        self.name = f"modelkiln_{os.getpid()}_client_{secrets.token_hex(8)}"
        if byte_size < 1:
            raise InputError(f"a region of {byte_size} bytes is not allowed; give 1 or more")
        self.key = f"/{self.name}"
        self.byte_size = byte_size
        self._memory = _allocate(_FOLDER / self.name, byte_size)
        self._used = 0

    def tensor(self, dtype: npt.DTypeLike, shape: tuple[int, ...]) -> SharedTensor:
        """A tensor in the region's next free place; its contents are whatever was there.

        Raises:
            InputError: the element type has no fixed size, a size is negative, or the region has no room left.
        """
        found = np.dtype(dtype)
        if found not in _DATATYPES:
            allowed = ", ".join(map(str, _DATATYPES))
            raise InputError(f"a tensor of {found} cannot lie in shared memory; allowed: {allowed}")
        if any(size < 0 for size in shape):
            raise InputError(f"a tensor of shape {list(shape)} is not allowed; sizes are 0 or more")
        size = math.prod(shape) * found.itemsize
        if size > self.byte_size - self._used:
            raise InputError(
                f"a tensor of {size} bytes does not fit the region: {self.byte_size - self._used} of its "
                f"{self.byte_size} bytes are free; make a larger one, or `clear` it"
            )
        array = np.frombuffer(self._memory, found, math.prod(shape), self._used).reshape(shape)
        placed = SharedTensor(self.name, self._used, _DATATYPES[found], array)
        self._used = min(self.byte_size, self._used + math.ceil(size / _ALIGNMENT) * _ALIGNMENT)
        return placed

    def put(self, array: npt.NDArray[Any]) -> SharedTensor:
        """A copy of `array` in the region's next free place."""
        placed = self.tensor(array.dtype, array.shape)
        placed.array[...] = array
        return placed

    def clear(self) -> None:
        """Makes the whole region free again; earlier tensors will be overwritten."""
        self._used = 0

    def unlink(self) -> None:
        """Removes the name. The memory goes with the last array that lies in it."""
        with contextlib.suppress(FileNotFoundError):
            (_FOLDER / self.name).unlink()

    def __del__(self) -> None:
        self.unlink()

    def refused(self, address: str, error: ClientError) -> ClientError:
        """What a failed registration means."""
        if not isinstance(error, ServerError):
            return error
        return SharedMemoryError(
            f"the server at {address} does not take a region of shared memory; it must run on this host, as a user "
            f"who may open {_FOLDER / self.name}, and its shared-memory routes must be open, as they are on loopback. "
            f"It said: {error.message}"
        )


def is_in_use(error: ServerError) -> bool:
    """Whether a region was not unregistered because a request still holds it."""
    return "currently in use" in error.message


def _allocate(path: Path, byte_size: int) -> mmap.mmap:
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    except OSError as error:
        raise SharedMemoryError(f"cannot make shared memory at {path}: {error.strerror}") from error
    try:
        os.posix_fallocate(descriptor, 0, byte_size)  # else a full /dev/shm would kill the process that writes
        return mmap.mmap(descriptor, byte_size)
    except OSError as error:
        path.unlink()
        free = os.statvfs(_FOLDER)
        raise SharedMemoryError(
            f"no room for {byte_size} bytes of shared memory ({error.strerror}); {_FOLDER} has "
            f"{free.f_bavail * free.f_frsize} bytes free (in Docker: --shm-size)"
        ) from error
    finally:
        os.close(descriptor)


class Registrar(Protocol):
    """A client, as far as a region needs it."""

    url: str

    def _register(self, block: SharedBlock) -> None: ...

    def _unregister(self, block: SharedBlock) -> None: ...


class AsyncRegistrar(Protocol):
    """The same for asyncio."""

    url: str

    async def _register(self, block: SharedBlock) -> None: ...

    async def _unregister(self, block: SharedBlock) -> None: ...


class SharedRegion(SharedBlock):
    """Shared memory that one client's server knows, until it is closed."""

    def __init__(self, client: Registrar, byte_size: int) -> None:
        super().__init__(byte_size)
        self._client = client
        self._open = True
        try:
            client._register(self)
        except ClientError as error:
            self.unlink()
            raise self.refused(client.url, error) from error

    def close(self) -> None:
        """Takes it from the server and removes it; arrays in it stay valid. A second call does nothing."""
        self.unlink()
        if self._open:
            self._open = False
            self._client._unregister(self)

    def __enter__(self) -> SharedRegion:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncSharedRegion(SharedBlock):
    """Shared memory that one client's server knows within `async with`."""

    def __init__(self, client: AsyncRegistrar, byte_size: int) -> None:
        super().__init__(byte_size)
        self._client = client

    async def __aenter__(self) -> AsyncSharedRegion:
        try:
            await self._client._register(self)
        except ClientError as error:
            self.unlink()
            raise self.refused(self._client.url, error) from error
        except BaseException:
            self.unlink()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.unlink()
        await self._client._unregister(self)
