"""Answers of language models as they come: iterators of `Chunk`s that cancel on the server when they are left."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from types import TracebackType

from clients.errors import ClientError, ServerError, StreamBroken
from clients.generation import Chunk, ChunkReader, Generation, GetOutput

# How long an answered request may take to be closed by the server, before it is cancelled after all.
CLOSING_S = 1.0


class AsyncSource(ABC):
    """The responses to one request that has been sent."""

    @abstractmethod
    async def read(self) -> GetOutput | None:
        """The next response; None after the last.

        Raises:
            ClientError: the request was refused, or broke off.
        """

    @abstractmethod
    def cancel(self) -> None:
        """Tells the server to stop; returns at once, and does nothing after the end."""


class _Pieces:
    """What has been read and not yet been handed out; which end is a good one."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.ready: deque[Chunk] = deque()
        self._reader = ChunkReader()

    @property
    def whole(self) -> bool:
        return self._reader.finished

    def take(self, get: GetOutput | None) -> None:
        if get is None:
            raise StreamBroken(self.address, "it ended without a reason to finish")
        try:
            self.ready.extend(self._reader.read(get))
        except (ValueError, IndexError) as error:
            raise StreamBroken(self.address, f"a response cannot be read: {error}") from error


class AsyncTextStream:
    """`async for chunk in client.astream(...)`.

    Leaving the loop cancels the request on the server as soon as the stream is let go, which a plain `async for` does
    at once. Where you keep it in a variable, use `async with`, or call `aclose`.
    """

    def __init__(self, address: str, start: Callable[[], Awaitable[AsyncSource]]) -> None:
        self._start = start
        self._pieces = _Pieces(address)
        self._source: AsyncSource | None = None
        self._ended = False

    def __aiter__(self) -> AsyncTextStream:
        return self

    async def __anext__(self) -> Chunk:
        ready = self._pieces.ready
        while not ready:
            if self._ended:
                raise StopAsyncIteration
            try:
                if self._source is None:
                    self._source = await self._start()
                self._pieces.take(await self._source.read())
            except ServerError:
                await self._finish()
                raise
            except BaseException:
                await self.aclose()
                raise
            if self._pieces.whole:
                await self._finish()
        return ready.popleft()

    async def _finish(self) -> None:
        """Lets the server close a request that it has answered or refused, before anybody hears of it.

        A cancel at that moment can make Triton 2.51 count it as under way for ever, and wait for it when it is stopped.
        """
        self._ended = True
        try:
            if self._source is not None:
                await asyncio.wait_for(self._rest(self._source), CLOSING_S)
        except (ClientError, asyncio.TimeoutError):
            pass
        finally:
            self._cancel()

    @staticmethod
    async def _rest(source: AsyncSource) -> None:
        while await source.read() is not None:
            pass

    async def aclose(self) -> None:
        """Ends the stream; what is not yet generated never will be."""
        self._ended = True
        self._pieces.ready.clear()
        self._cancel()

    def _cancel(self) -> None:
        if self._source is not None:
            self._source.cancel()

    async def __aenter__(self) -> AsyncTextStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def __del__(self) -> None:
        self._cancel()


def whole_answer(chunks: Iterable[Chunk]) -> Generation:
    """The chunks of a request put together, answer by answer."""
    answers: dict[int, list[Chunk]] = {}
    for chunk in chunks:
        answers.setdefault(chunk.index, []).append(chunk)
    return Generation(tuple(_joined(index, answers[index]) for index in sorted(answers)))


def _joined(index: int, chunks: list[Chunk]) -> Chunk:
    last = chunks[-1]
    logprobs = [entry for chunk in chunks for entry in chunk.logprobs or ()]
    token_ids = [token for chunk in chunks for token in chunk.token_ids or ()]
    return Chunk(
        "".join(chunk.text for chunk in chunks),
        index,
        last.finish_reason,
        last.usage,
        logprobs if last.logprobs is not None else None,
        tuple(token_ids) if last.token_ids is not None else None,
        last.cumulative_logprob,
    )
