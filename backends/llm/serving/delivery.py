"""Delivery: brings what the engine's steps add to the clients, and notices clients that are gone.

A thread of its own: sending waits for the server, and meanwhile the engine computes the next step. It computes no more
than that one ahead: answers would get later and later, and clients that are gone would be noticed too late.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from backends.llm.engine.results import StepOutput
from backends.llm.serving.errors import CANCELLED, ResponseError, response_error
from backends.llm.serving.responses import ResponseBuilder, ResponseTensors, empty_response

log = logging.getLogger(__name__)

# How many of the requests that have no token yet are asked after a step whether their client is still there.
_ASKED_WAITING = 8


class Channel(Protocol):
    """The way back to one client."""

    def send(self, tensors: ResponseTensors | None, error: ResponseError | None, *, final: bool) -> None:
        """Sends one response; with neither tensors nor an error it only says that nothing more comes."""
        ...

    def is_cancelled(self) -> bool:
        """Returns whether nobody waits for the answer any more."""
        ...


@dataclass(eq=False, slots=True)
class _Open:
    """A request whose last response has not been sent."""

    request_id: str
    channel: Channel
    builder: ResponseBuilder
    cancel_id: str
    has_tokens: bool = False


class Delivery:
    """The sink of an EngineThread; its own thread does all the work, in the order of the calls.

    Every request that was opened gets exactly one final response.

    Args:
        abort: ends a request in the engine; called with the ids of those whose clients are gone.
    """

    def __init__(self, abort: Callable[[str], None]) -> None:
        self._abort = abort
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._open: dict[str, _Open] = {}
        self._waiting: deque[_Open] = deque()
        self._generating: deque[_Open] = deque()
        self._previous_step = threading.Semaphore(1)  # free when it is delivered
        self._thread = threading.Thread(target=self._run, name="llm-delivery", daemon=True)
        self._thread.start()

    def open(self, request_id: str, channel: Channel, builder: ResponseBuilder, cancel_id: str = "") -> None:
        """Takes a request's channel over; to be called before the engine hears of the request."""
        self._work.put(lambda: self._take_over(_Open(request_id, channel, builder, cancel_id)))

    def cancel(self, cancel_id: str, channel: Channel) -> None:
        """Ends the requests that were opened with this id, if any are left, and answers who has asked for it."""
        self._work.put(lambda: self._cancel(cancel_id, channel))

    def if_open(self, request_id: str, then: Callable[[], None]) -> None:
        """Calls `then` if the request has not ended; after an abort of it that came before, never."""
        self._work.put(lambda: then() if request_id in self._open else None)

    def step(self, outputs: Sequence[StepOutput]) -> None:
        """See Sink; waits until the step before is delivered."""
        self._previous_step.acquire()
        self._work.put(lambda: self._deliver(outputs))

    def refuse(self, request_id: str, error: ResponseError) -> None:
        """See Sink."""
        self._work.put(lambda: self._end(request_id, error))

    def refuse_all(self, error: ResponseError) -> None:
        """See Sink."""
        self._work.put(lambda: self._end_all(error))

    def then(self, action: Callable[[], None]) -> None:
        """Does something when all that was put before is delivered."""
        self._work.put(action)

    def close(self, timeout_s: float = 30.0) -> bool:
        """Waits until all that was put is delivered; returns whether that was in time."""
        self._work.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except Exception:
                log.exception("a step was not delivered")

    def _take_over(self, request: _Open) -> None:
        self._open[request.request_id] = request
        self._waiting.append(request)

    def _cancel(self, cancel_id: str, channel: Channel) -> None:
        for request in [request for request in self._open.values() if request.cancel_id == cancel_id]:
            self._give_up(request, CANCELLED)
        channel.send(empty_response(), None, final=True)

    def _deliver(self, outputs: Sequence[StepOutput]) -> None:
        try:
            self._deliver_all(outputs)
        finally:
            self._previous_step.release()

    def _deliver_all(self, outputs: Sequence[StepOutput]) -> None:
        by_request: dict[str, list[StepOutput]] = {}
        for output in outputs:
            by_request.setdefault(output.request_id, []).append(output)
        for request_id, mine in by_request.items():
            request = self._open.get(request_id)
            if request is not None:  # else it was cancelled while the step ran
                self._deliver_one(request, mine)
        self._ask(self._waiting, _ASKED_WAITING)
        self._ask(self._generating, (len(self._generating) + 1) // 2)

    def _deliver_one(self, request: _Open, outputs: Sequence[StepOutput]) -> None:
        failed = next((output for output in outputs if output.error), None)
        if failed is not None:
            kind = "invalid_request" if failed.error_param else "internal"
            self._give_up(request, ResponseError(kind, failed.error, failed.error_param))
            return
        try:
            for output in outputs:
                request.builder.add(output)
            is_last = outputs[-1].is_last
            tensors = request.builder.take(is_last=is_last)
        except Exception as error:  # one request's error is its own
            log.exception("request %s has no response", request.request_id)
            self._give_up(request, response_error(error))
            return
        if not request.has_tokens:
            request.has_tokens = True
            self._generating.append(request)
        if tensors is not None:
            self._send(request, tensors, None, final=is_last)

    def _ask(self, requests: deque[_Open], count: int) -> None:
        """Asks the next requests in turn whether they are cancelled, and forgets those that have ended or moved on."""
        for _ in range(min(count, len(requests))):
            request = requests.popleft()
            if request.request_id not in self._open or (requests is self._waiting and request.has_tokens):
                continue
            if request.channel.is_cancelled():
                self._give_up(request, None)
            else:
                requests.append(request)

    def _give_up(self, request: _Open, error: ResponseError | None) -> None:
        self._abort(request.request_id)
        self._end(request.request_id, error)

    def _end_all(self, error: ResponseError) -> None:
        for request_id in list(self._open):
            self._end(request_id, error)

    def _end(self, request_id: str, error: ResponseError | None) -> None:
        request = self._open.get(request_id)
        if request is not None:
            self._send(request, None, error, final=True)

    def _send(
        self, request: _Open, tensors: ResponseTensors | None, error: ResponseError | None, *, final: bool
    ) -> None:
        if final:
            del self._open[request.request_id]
        try:
            request.channel.send(tensors, error, final=final)
        except Exception:
            log.exception("a response of request %s was not sent", request.request_id)
            if not final:
                self._give_up(request, None)
