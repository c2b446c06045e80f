"""The responses of one stream of gRPC for asyncio."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from clients.async_streams import AsyncSource
from clients.errors import ClientError
from clients.generation import GetOutput
from clients.stream_messages import StreamMessages

# Messages that are kept until they are asked for; the server waits with more.
_MAX_AHEAD = 256


class GrpcSource(AsyncSource):
    """Reads a call in a task of its own: `grpc.aio` cancels a call when the task that reads it is cancelled.

    Args:
        call: of `grpc.aio`.
        failure: what its error stands for.
        leave: has the server end the answer, and may take its time; None where the server knows no way.
    """

    def __init__(
        self,
        call: Any,
        failure: Callable[[Any], Awaitable[ClientError]],
        leave: Callable[[GrpcSource], None] | None,
    ) -> None:
        self._call = call
        self._failure = failure
        self._leave = leave
        self._messages = StreamMessages()
        self._arrived: deque[bytes] = deque()
        self._waiter: asyncio.Future[None] | None = None  # for a message
        self._room: asyncio.Future[None] | None = None  # for the next one
        self._skips = False
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.create_task(self._read_all())

    async def read(self) -> GetOutput | None:
        while not self._arrived:
            if self._task.done():
                error = self._task.result()
                if error is not None:
                    raise await self._failure(error)
                return None
            self._waiter = self._loop.create_future()
            await self._waiter
        message = self._arrived.popleft()
        _wake(self._room)
        return self._messages.read(message)

    async def ended(self) -> None:
        """Returns when the server has ended the answer, or it has broken off; what still comes is not kept."""
        self._skips = True
        self._arrived.clear()
        _wake(self._room)
        await asyncio.shield(self._task)

    def drop(self) -> None:
        self._call.cancel()

    def cancel(self) -> None:
        if self._leave is None:
            self.drop()
            return
        leave, self._leave = self._leave, None
        if asyncio._get_running_loop() is self._loop:
            leave(self)
        elif not self._loop.is_closed():  # the garbage collection calls from any thread
            self._loop.call_soon_threadsafe(leave, self)

    async def _read_all(self) -> BaseException | None:
        """Returns the error of the call, or None where it ended well."""
        import grpc

        try:
            while (message := await self._call.read()) is not grpc.aio.EOF:
                if self._skips:
                    continue
                self._arrived.append(message)
                _wake(self._waiter)
                if len(self._arrived) >= _MAX_AHEAD:
                    self._room = self._loop.create_future()
                    await self._room
            return None
        except (grpc.RpcError, asyncio.CancelledError) as error:  # nobody cancels this task, but the call
            return error
        finally:
            self._loop.call_soon(_wake, self._waiter)  # when this task is done


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
