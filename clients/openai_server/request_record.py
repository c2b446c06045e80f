"""What is known of one HTTP request: for its log line, its metrics, and errors after its answer began."""

from __future__ import annotations

import time
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from typing import Any, cast

from clients.openai_server.answers import Usage

_KEY = "modelkiln.record"


@dataclass
class RequestRecord:
    """Filled in on the way by whoever learns it.

    Attributes:
        status: of the response; 499 where the client left before it.
        is_stream: the response's body is server-sent events.
        error_type: of an error that came after the response had begun.
    """

    request_id: str
    method: str
    path: str
    started_s: float = field(default_factory=time.perf_counter)
    status: int = 499
    model: str = ""
    usage: Usage = field(default_factory=Usage)
    first_token_s: float | None = None
    is_stream: bool = False
    error_type: str = ""

    def note_first_token(self) -> None:
        if self.first_token_s is None:
            self.first_token_s = time.perf_counter() - self.started_s

    @property
    def duration_s(self) -> float:
        return time.perf_counter() - self.started_s


def put_record(scope: MutableMapping[str, Any], record: RequestRecord) -> None:
    scope[_KEY] = record


def record_of(scope: MutableMapping[str, Any]) -> RequestRecord:
    return cast(RequestRecord, scope[_KEY])
