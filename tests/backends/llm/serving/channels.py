"""A client's side of a request, and waiting for it without sleeping."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

from backends.llm.serving.errors import ResponseError

PATIENCE_S = 60.0


@dataclass
class RecordingChannel:
    """Keeps what it is sent.

    Attributes:
        cancelled: what `is_cancelled` says.
        num_asked: how often it was asked.
        num_late: what was sent after the final response.
        fails: `send` raises.
    """

    cancelled: bool = False
    fails: bool = False
    num_asked: int = 0
    num_late: int = 0
    responses: list[dict[str, Any]] = field(default_factory=list)
    errors: list[ResponseError] = field(default_factory=list)
    _final: threading.Event = field(default_factory=threading.Event)
    _arrived: threading.Condition = field(default_factory=threading.Condition)

    def send(self, tensors, error, *, final):
        with self._arrived:
            self.num_late += self._final.is_set()
            if tensors is not None:
                self.responses.append(tensors)
            if error is not None:
                self.errors.append(error)
            self._arrived.notify_all()
        if final:
            self._final.set()
        if self.fails:
            raise RuntimeError("the client's line is broken")

    def is_cancelled(self):
        self.num_asked += 1
        return self.cancelled

    def wait(self) -> RecordingChannel:
        """Waits for the final response."""
        assert self._final.wait(PATIENCE_S), "no final response"
        return self

    def wait_for_responses(self, count: int) -> None:
        with self._arrived:
            assert self._arrived.wait_for(lambda: len(self.responses) >= count, PATIENCE_S)

    @property
    def text(self) -> str:
        return "".join(response["text_output"][0].decode() for response in self.responses)
