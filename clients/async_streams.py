"""`AsyncTextStream`: as in `clients/streams.py`, for asyncio."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from types import TracebackType

from clients.errors import ClientError, ServerError, StreamBroken
from clients.generation import Chunk, ChunkReader, GetOutput
from clients.requests import InferRequest
from clients.retries import Attempts
from clients.streams import CLOSING_S, Pieces
from clients.watch import AsyncWatcher, Model


class AsyncSource(ABC):
    """The same for asyncio."""

    @abstractmethod
    async def read(self) -> GetOutput | None: ...

    @abstractmethod
    def drop(self) -> None: ...

    def cancel(self) -> None:
        self.drop()


class AsyncTextStream(Pieces):
    """`async for chunk in client.astream(...)`.

    Leaving the loop cancels the request on the server as soon as the stream is let go, which a plain `async for` does
    at once. Where you keep it in a variable, use `async with`, or call `aclose`.
    """

    def __init__(
        self,
        address: str,
        model: Model,
        attempts: Attempts,
        watcher: AsyncWatcher,
        prepare: Callable[[Attempts], Awaitable[InferRequest]],
        start: Callable[[InferRequest, float], Awaitable[AsyncSource]],
    ) -> None:
        super().__init__(address, model, attempts)
        self._watcher = watcher
        self._prepare = prepare
        self._start = start
        self._source: AsyncSource | None = None

    def __aiter__(self) -> AsyncTextStream:
        return self

    async def __anext__(self) -> Chunk:
        while not self._ready:
            if self._ended:
                raise StopAsyncIteration
            self._begin_to_wait("task")
            try:
                source = self._source
                is_last = self._take(await source.read() if source and self._begun else await self._first())
            except BaseException as error:
                if self._ended and isinstance(error, ClientError):
                    raise StreamBroken(self._address, self._lost or "another task closed it") from error
                if isinstance(error, ServerError):
                    await self._finish()
                elif isinstance(error, ClientError):
                    self.lose(str(error))
                else:
                    await self.aclose()
                raise
            if self._ended:
                raise StreamBroken(self._address, self._lost or "another task closed it")
            if is_last:
                await self._finish()
        return self._ready.popleft()

    async def _first(self) -> GetOutput | None:
        """As in `TextStream`."""
        request = await self._prepare(self._attempts)
        self._reader = ChunkReader(request)
        self._watcher.add(self)
        while True:
            try:
                self._source = await self._start(request, self._attempts.next_s())
                if self._ended:  # another task closed it meanwhile
                    self._source.cancel()
                first = await self._source.read()
            except ClientError as error:
                if self._ended:
                    raise
                await asyncio.sleep(self._attempts.wait_s(error))
            else:
                self._begun = True
                self._attempts.succeeded()
                return first

    async def _finish(self) -> None:
        """Lets the server close a request that it has answered or refused, before anybody hears of it.

        A cancel at that moment can make Triton 2.51 count it as under way for ever, and wait for it when it is stopped.
        """
        self._end()
        if self._source is None:
            return
        try:
            await asyncio.wait_for(_rest(self._source), CLOSING_S)
        except (ClientError, asyncio.TimeoutError):
            pass
        finally:
            self._source.drop()

    async def aclose(self) -> None:
        """Ends the stream; what is not yet generated never will be."""
        was_open = not self._ended
        self._end()
        self._ready.clear()
        if was_open and self._source is not None:
            self._source.cancel()

    def lose(self, reason: str) -> None:
        """As in `TextStream`."""
        self._lost = reason
        self._ready.clear()
        self._end()
        if self._source is not None:
            self._source.drop()

    def _end(self) -> None:
        self._ended = True
        self._watcher.streams.remove(self)

    async def __aenter__(self) -> AsyncTextStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        if not self._ended and self._source is not None:
            self._source.cancel()


async def _rest(source: AsyncSource) -> None:
    while await source.read() is not None:
        pass
