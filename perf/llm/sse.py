"""A language model over the OpenAI API: what arrives is stamped as it comes, and read after the run.

A token costs a system call, two appends and a look for the end of the HTTP chunks; no event is parsed meanwhile.
"""

from __future__ import annotations

import json
import time
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from perf.http_sender import HttpConnection, HttpSender
from perf.llm.answers import NO_USAGE, Answer, Chunk, Piece, chunks_of
from perf.records import ErrorKind

_END = b"[DONE]"


@dataclass(frozen=True)
class SseReceived:
    """The bytes of one HTTP answer.

    Attributes:
        raw: header and body as they came.
        body_at: where the body begins.
        ends: how many bytes had come at each stamp, ascending.
    """

    raw: bytes
    body_at: int
    ends: list[int]
    stamps_ns: list[int]

    @property
    def failed(self) -> bool:
        """True when an event is an error, at a first look."""
        return self.raw.find(b'data: {"error"', self.body_at) >= 0


class SseConnection(HttpConnection):
    """Stamps every piece of an answer."""

    def __init__(self) -> None:
        super().__init__()
        self._ends: list[int] = []
        self._stamps_ns: list[int] = []

    def data_received(self, data: bytes) -> None:
        self._stamps_ns.append(time.perf_counter_ns())
        self._ends.append(len(self._received) + len(data))
        super().data_received(data)

    async def request(self, payload: bytes) -> Any:
        self._ends, self._stamps_ns = [], []
        return await super().request(payload)

    def _result(self, received: bytearray, body_at: int) -> SseReceived:
        return SseReceived(bytes(received), body_at, self._ends, self._stamps_ns)


class SseSender(HttpSender):
    """Connections that stamp."""

    connection_type = SseConnection


def read_sse(received: SseReceived) -> Answer:
    """What a stream of events says, or one document where nothing was streamed."""
    if b"\ncontent-type: text/event-stream" not in received.raw[: received.body_at].lower():
        return _read_document(received)
    pieces: list[Piece] = []
    usage: dict[str, Any] = {}
    ended = False
    for at_ns, data in _events(received):
        if data == _END:
            ended = True
            break
        try:
            event = json.loads(data)
        except ValueError:
            shown = data[:200].decode("utf-8", "replace")
            return Answer(error=ErrorKind("bad event", f"an event is not JSON: {shown}"))
        if event.get("error"):
            return Answer(error=_error_event(event["error"]))
        told = event.get("usage") or {}  # some servers say it once, and not with the last event
        usage = told or usage
        pieces.append(Piece(at_ns, _has_text(event.get("choices")), told.get("completion_tokens")))
    if not ended:
        return Answer(error=ErrorKind("cut stream", "the stream ended without [DONE]"))
    found = chunks_of(pieces)
    return Answer(error=NO_USAGE) if found is None else Answer(found[0], *_input_counts(usage), counted=found[1])


def _read_document(received: SseReceived) -> Answer:
    body = b"".join(part for _, part in _body(received))
    try:
        document = json.loads(body)
        if document.get("error"):
            return Answer(error=_error_event(document["error"]))
        usage = document["usage"]
        chunk = Chunk(received.stamps_ns[-1], int(usage["completion_tokens"]))
    except (ValueError, KeyError, TypeError):
        return Answer(error=NO_USAGE)
    return Answer((chunk,), *_input_counts(usage))


def _has_text(choices: Any) -> bool:
    for choice in choices or ():
        delta = choice.get("delta") or {}
        if choice.get("text") or any(delta.get(key) for key in ("content", "reasoning_content", "tool_calls")):
            return True
    return False


def _input_counts(usage: dict[str, Any]) -> tuple[int | None, int | None]:
    details = usage.get("prompt_tokens_details") or {}
    return usage.get("prompt_tokens"), details.get("cached_tokens")


def _error_event(error: Any) -> ErrorKind:
    if not isinstance(error, dict):
        return ErrorKind("error event", str(error))
    return ErrorKind(f"error event {error.get('code') or error.get('type') or ''}".strip(), str(error.get("message")))


def _events(received: SseReceived) -> Iterator[tuple[int, bytes]]:
    """The data of each event, with the time at which its last byte came."""
    unread = bytearray()
    for raw_end, part in _body(received):
        unread += part
        while True:
            ends = [at + len(mark) for mark in (b"\n\n", b"\r\n\r\n") if (at := unread.find(mark)) >= 0]
            if not ends:
                break
            event, unread = unread[: min(ends)], unread[min(ends) :]
            at_ns = received.stamps_ns[bisect_left(received.ends, raw_end - len(unread))]
            lines = (line[5:].strip() for line in event.splitlines() if line.startswith(b"data:"))
            if data := b"\n".join(map(bytes, lines)):
                yield at_ns, data


def _body(received: SseReceived) -> Iterator[tuple[int, bytes]]:
    """The body's parts without HTTP's chunk headers, each with where it ends in `raw`."""
    raw, at = received.raw, received.body_at
    if b"\r\ncontent-length:" in raw[:at].lower():
        yield len(raw), raw[at:]
        return
    while (line_end := raw.find(b"\r\n", at)) >= 0:
        size = int(raw[at:line_end].split(b";")[0], 16)
        if size == 0:
            return
        yield line_end + 2 + size, raw[line_end + 2 : line_end + 2 + size]
        at = line_end + 2 + size + 2
