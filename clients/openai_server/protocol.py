"""HTTP with limits that uvicorn lacks: the size and time of a request's head, chunks, and clients that do not read."""

from __future__ import annotations

import asyncio
import logging
from array import array
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from clients.openai_server.body import CHUNK_COUNT
from clients.openai_server.errors import ApiError
from clients.openai_server.settings import Limits

log = logging.getLogger("modelkiln.openai")
_LINGER_S = 2.0  # after an error that ends the connection: a client that still sends must find the answer


class LimitedProtocol(HttpToolsProtocol):
    """One connection. `with_limits` makes the class that uvicorn is given."""

    limits = Limits()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser = _Parser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn has it
        self._in_head = True
        self._head_bytes = 0  # of the reads in which the head came: at least what it has
        self._named_bytes = 0  # of the head's parts that are complete
        self._chunks = {"seen": 0}
        self._unwanted_bytes = 0  # of a body whose answer was sent
        self._refused = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._head_timer = self.loop.call_later(self.limits.head_s, self._head_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timers()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > self.limits.head_bytes and not self._refused:
            self._refuse_head()

    # Parser callbacks

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.limits.head_s, self._head_is_late)
        self._in_head = True
        self._named_bytes = 0
        self._chunks = {"seen": 0}
        self._unwanted_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._named_bytes += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._named_bytes += len(name) + len(value) + 4
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.wants_upgrade():
            return  # it comes again without the wish
        self._in_head = False
        self._head_bytes = 0
        self._stop_head_timer()
        if self._named_bytes > self.limits.head_bytes:
            return self._refuse_head()
        self.scope["extensions"] = {CHUNK_COUNT: self._chunks}  # type: ignore[dict-item]
        super().on_headers_complete()

    def on_chunk_header(self) -> None:
        self._chunks["seen"] += 1

    def on_body(self, body: bytes) -> None:
        if self._refused:
            return
        if self.cycle.response_complete:
            self._unwanted_bytes += len(body)
            if self._unwanted_bytes > self.limits.body_bytes:
                self.transport.abort()
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._refused and not self.wants_upgrade():
            super().on_message_complete()

    # Other protocols

    def wants_upgrade(self) -> bool:
        """Returns whether the request whose head was read asks for another protocol, if there is one here."""
        return bool(self.parser.should_upgrade()) and any(name == b"upgrade" for name, _ in self.headers)

    def head_without_upgrade(self) -> bytes:
        """Returns the head that was read, as a client writes it that asks for no other protocol."""
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())]
        lines += [b"%s: %s" % (name, value) for name, value in self.headers if name != b"upgrade"]
        return b"\r\n".join([*lines, b"", b""])

    # Flow control

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self.limits.write_stall_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    # Refusals

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, "this is not valid HTTP", code="invalid_http"))

    def _refuse_head(self) -> None:
        self._refuse(
            ApiError(431, f"the request's head is longer than {self.limits.head_bytes} bytes", code="request_too_large")
        )

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self._head_bytes or self._named_bytes:
            self._refuse(ApiError(408, f"the request's head did not come within {self.limits.head_s:g} s"))
        else:
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """Answers and closes; what the client still sends is read for a moment, or it would never see the answer."""
        self._refused = True
        self._stop_timers()
        log.info("refused before it was a request: status=%d %s", error.status, error.message)
        busy = self.cycle is not None and not self.cycle.response_complete
        if busy or self.transport.is_closing():
            self.transport.close()  # an answer to an earlier request is under way: nothing can be said
            return
        body = error.body()
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[error.status] + head + body)
        self.transport.write_eof()
        self.loop.call_later(_LINGER_S, self.transport.close)

    def _stop_timers(self) -> None:
        self._stop_head_timer()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


class _Parser(httptools.HttpRequestParser):
    """Reads a request that asks for another protocol as if it did not, which every server may.

    Java's own client asks for HTTP/2 with each request. The parser would take its body for the other protocol.
    """

    def __init__(self, protocol: LimitedProtocol) -> None:
        super().__init__(protocol)
        self._protocol = protocol

    def feed_data(self, data: bytes | bytearray | memoryview | array[int]) -> None:
        while True:
            try:
                return super().feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                if not self._protocol.wants_upgrade():
                    raise  # CONNECT
                data = self._protocol.head_without_upgrade() + bytes(data[upgrade.args[0] :])


def with_limits(limits: Limits) -> type[LimitedProtocol]:
    return type("ConfiguredProtocol", (LimitedProtocol,), {"limits": limits})
