"""Answers over gRPC that nobody wants any more: the server is asked to end them, and what still comes is read.

A cancel of gRPC's own, which comes while a response is on its way, now and then crashes Triton 2.51
(triton-inference-server/server issues 7368 and 8034), and with it everybody's answers. A request that names another one
in its input `cancel` (docs/serving_llm.md) ends it as an answer ends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from clients.errors import ClientError
from clients.requests import InferRequest
from clients.streams import CLOSING_S


class Stream(Protocol):
    """An answer under way."""

    def skip_rest(self) -> None:
        """Returns when the server has ended it, or it has broken off."""

    def drop(self) -> None:
        """Breaks it off; from any thread."""


@dataclass(frozen=True)
class _Left:
    stream: Stream
    cancel: InferRequest
    end: float  # time.monotonic


class Leaver:
    """Leaves streams in a thread of its own, which lives while there are any; streams of asyncio are left by tasks.

    Args:
        start: sends a request that has many responses; called in that thread.
    """

    def __init__(self, start: Callable[[InferRequest, float], Stream]) -> None:
        self._start = start
        self._lock = threading.RLock()  # a stream may be left by the garbage collection, also in here
        self._left: list[_Left] = []
        self._thread: threading.Thread | None = None

    def leave(self, stream: Stream, cancel: InferRequest) -> None:
        """Has the server end the answer within CLOSING_S, and drops it where that fails; returns at once."""
        with self._lock:
            self._left.append(_Left(stream, cancel, time.monotonic() + CLOSING_S))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="client-leaver", daemon=True)
                self._thread.start()

    def wait(self) -> None:
        """Returns when all streams are left."""
        thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._lock:
                left, self._left = self._left, []
                if not left:
                    self._thread = None
                    return
            self._end(left)

    def _end(self, left: Sequence[_Left]) -> None:
        def drop() -> None:
            for one in left:
                one.stream.drop()

        left_s = left[0].end - time.monotonic()
        too_late = threading.Timer(max(0.0, left_s), drop)
        too_late.start()
        try:
            if left_s > 0:  # those before took all the time otherwise: the server does not answer
                for sent in [self._start(one.cancel, left_s) for one in left]:
                    sent.skip_rest()
                for one in left:
                    one.stream.skip_rest()
        except ClientError:  # the client was closed
            pass
        finally:
            too_late.cancel()
            drop()
