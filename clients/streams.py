"""Answers of language models as they come: iterators of `Chunk`s that cancel on the server when they are left.

Those of threads; `clients/async_streams.py` has those of asyncio.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from types import TracebackType

from clients.errors import ClientError, ServerError, StreamBroken
from clients.generation import Chunk, ChunkReader, Generation, GetOutput
from clients.requests import InferRequest
from clients.retries import Attempts
from clients.watch import Model, Watcher

# How long an answered request may take to be closed by the server, before it is cancelled after all.
CLOSING_S = 1.0


class Source(ABC):
    """The responses to one request that has been sent; read by one thread."""

    @abstractmethod
    def read(self) -> GetOutput | None:
        """The next response; None after the last.

        Raises:
            ClientError: the request was refused, or broke off.
        """

    @abstractmethod
    def drop(self) -> None:
        """Breaks the connection off; returns at once, does nothing after the end, and may be called by any thread."""

    def cancel(self) -> None:
        """Has the server end the answer; otherwise as `drop`, which it is where the protocol has nothing gentler."""
        self.drop()


class Pieces:
    """What both kinds of stream keep: what has been read and not yet been handed out, and how it ends.

    Attributes:
        model, waiting_since: for `clients.watch`.
    """

    def __init__(self, address: str, model: Model, attempts: Attempts) -> None:
        self.model = model
        self.waiting_since: float | None = None
        self._address = address
        self._attempts = attempts
        self._ready: deque[Chunk] = deque()
        self._reader: ChunkReader | None = None  # of the request, when that is made
        self._begun = False
        self._ended = False
        self._lost = ""

    def _begin_to_wait(self, reader: str) -> None:
        if self.waiting_since is not None:
            raise ClientError(
                f"another {reader} waits for the next chunk of this stream; only one may read it at a time"
            )
        self.waiting_since = time.monotonic()

    def _take(self, get: GetOutput | None) -> bool:
        """Takes a response over; returns whether it was the last."""
        self.waiting_since = None
        assert self._reader is not None
        if get is None:
            if self._reader.says_end:
                raise StreamBroken(self._address, "it ended without a reason to finish")
            return True
        try:
            self._ready.extend(self._reader.read(get))
        except (ValueError, LookupError, TypeError) as error:
            raise StreamBroken(self._address, f"a response cannot be read: {error!r}") from error
        return self._reader.finished


class TextStream(Pieces):
    """`for chunk in client.stream(...)`.

    Leaving the loop cancels the request on the server as soon as the stream is let go, which a plain `for` does at
    once. Where you keep it in a variable, use `with`, or call `close`.
    """

    def __init__(
        self,
        address: str,
        model: Model,
        attempts: Attempts,
        watcher: Watcher,
        prepare: Callable[[Attempts], InferRequest],
        start: Callable[[InferRequest, float], Source],
    ) -> None:
        super().__init__(address, model, attempts)
        self._watcher = watcher
        self._prepare = prepare
        self._start = start
        self._source: Source | None = None

    def __iter__(self) -> TextStream:
        return self

    def __next__(self) -> Chunk:
        while not self._ready:
            if self._ended:
                raise StopIteration
            self._begin_to_wait("thread")
            try:
                is_last = self._take(self._source.read() if self._source and self._begun else self._first())
            except BaseException as error:
                if self._ended and isinstance(error, ClientError):
                    raise StreamBroken(self._address, self._lost or "another thread closed it") from error
                if isinstance(error, ServerError):
                    self._finish()
                elif isinstance(error, ClientError):
                    self.lose(str(error))
                else:
                    self.close()
                raise
            if self._ended:
                raise StreamBroken(self._address, self._lost or "another thread closed it")
            if is_last:
                self._finish()
        try:
            return self._ready.popleft()
        except IndexError:  # at this very moment
            raise StreamBroken(self._address, "another thread closed it") from None

    def _first(self) -> GetOutput | None:
        """Sends the request, again where that is safe, and returns the first response."""
        request = self._prepare(self._attempts)
        self._reader = ChunkReader(request)
        self._watcher.add(self)
        while True:
            try:
                self._source = self._start(request, self._attempts.next_s())
                if self._ended:  # another thread closed it meanwhile
                    self._source.cancel()
                first = self._source.read()
            except ClientError as error:
                if self._ended:
                    raise
                time.sleep(self._attempts.wait_s(error))
            else:
                self._begun = True
                self._attempts.succeeded()
                return first

    def _finish(self) -> None:
        """As in `AsyncTextStream`."""
        self._end()
        if self._source is None:
            return
        too_late = threading.Timer(CLOSING_S, self._source.drop)
        too_late.start()
        try:
            while self._source.read() is not None:
                pass
        except ClientError:
            pass
        finally:
            too_late.cancel()
            self._source.drop()

    def close(self) -> None:
        """Ends the stream; what is not yet generated never will be."""
        was_open = not self._ended
        self._end()  # before the cancel, which wakes a thread that reads
        self._ready.clear()
        if was_open and self._source is not None:
            self._source.cancel()

    def lose(self, reason: str) -> None:
        """Ends the stream with an error, for `clients.watch`: nobody is there who could end it."""
        self._lost = reason
        self._ready.clear()
        self._end()
        if self._source is not None:
            self._source.drop()

    def _end(self) -> None:
        self._ended = True
        self._watcher.streams.remove(self)

    def __enter__(self) -> TextStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._ended and self._source is not None:
            self._source.cancel()


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
        last.prompt_logprobs,
    )
