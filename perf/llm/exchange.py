"""One request and what came of it, as the load generator leaves it and as the figures need it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from perf.errors import RequestFailed
from perf.llm.answers import Answer
from perf.records import ErrorKind


class Received(Protocol):
    """Unread bytes of an answer."""

    @property
    def failed(self) -> bool: ...


@dataclass(frozen=True)
class Exchange:
    """Times are of one monotonic clock, in nanoseconds.

    Attributes:
        due_ns: when it was to be sent; in a closed loop this is when it was sent.
        ended_ns: when the answer, an error or a timeout came.
        received: None where the request failed before an answer.
        failure: None where there is an answer, whatever it says.
    """

    due_ns: int
    sent_ns: int
    ended_ns: int
    received: Any
    failure: RequestFailed | None


@dataclass(frozen=True)
class Outcome:
    """One request, read. `answer.error` tells a failure."""

    due_ns: int
    sent_ns: int
    ended_ns: int
    answer: Answer

    @property
    def ok(self) -> bool:
        return self.answer.error is None


def read_exchange(exchange: Exchange, read: Callable[[Any], Answer]) -> Outcome:
    """The answer of one exchange, read by the protocol's reader; a failure is an answer with an error."""
    if exchange.failure is not None:
        answer = Answer(error=ErrorKind(exchange.failure.kind, exchange.failure.message))
    else:
        try:
            answer = read(exchange.received)
        except Exception as error:  # whatever a server says, it fails this one request and not the whole run
            answer = Answer(error=ErrorKind("bad answer", f"the answer cannot be read: {error!r}"))
        if answer.error is None and not answer.chunks:
            answer = Answer(error=ErrorKind("no tokens", "the answer has no token"))
    return Outcome(exchange.due_ns, exchange.sent_ns, exchange.ended_ns, answer)
