"""Sends pre-serialised inference requests over HTTP/1.1 and reads as little of each answer as it must.

Not a general HTTP client: one request at a time per connection, plain TCP. A request costs a write, a future
and a search for the end of the answer: three times as many requests per second as aiohttp.
"""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from perf.errors import RequestFailed

_STATUS = slice(9, 12)  # of b"HTTP/1.1 200 OK"
_ERROR_BODY = b'{"error"'  # a proxy may say 200 and put an error into the body: it is no success (h07)


class HttpConnection(asyncio.Protocol):
    """One keep-alive connection. `request` is called again only after it has returned or raised."""

    def __init__(self) -> None:
        self.started_s = 0.0  # when the request in flight was written; 0 when there is none
        self.usable = True
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[Any] | None = None
        self._received = bytearray()
        self._needed = 0  # 0 until the header is read; then where the answer, or its last whole chunk, ends
        self._chunked = False

    async def request(self, payload: bytes) -> Any:
        """Send `payload`, a whole HTTP request, wait for the end of its answer and return `_result` of it.

        Raises:
            RequestFailed: a status other than 200, an error in the body, a broken connection or a timeout.
        """
        assert self._transport is not None and not self._received
        self._answer = asyncio.get_running_loop().create_future()
        self.started_s = time.monotonic()
        self._transport.write(payload)
        try:
            return await self._answer
        except asyncio.CancelledError:
            self.close()
            raise
        finally:
            self.started_s = 0.0

    def fail(self, kind: str, message: str) -> None:
        """End the request in flight with an error; the connection cannot be used again."""
        self.usable = False
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(RequestFailed(kind, message))
        if self._transport is not None:
            self._transport.close()

    def close(self) -> None:
        self.fail("connection", "closed by the client")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self.fail("connection", str(error) if error else "closed by the server")

    def data_received(self, data: bytes) -> None:
        if self._answer is None or self._answer.done():
            self.fail("protocol", "the server sent something unasked")
            return
        self._received += data
        if self._needed == 0 and not self._read_header():
            return
        if self._chunked:
            self._needed = skip_chunks(self._received, self._needed)
            complete = self._received.endswith(b"0\r\n\r\n", self._needed)
        else:
            complete = len(self._received) >= self._needed
        if complete:
            self._finish()

    def _read_header(self) -> bool:
        end = self._received.find(b"\r\n\r\n")
        if end < 0:
            return False
        header = bytes(self._received[: end + 2]).lower()
        length_at = header.find(b"\r\ncontent-length:")
        self._chunked = length_at < 0
        if self._chunked and b"\r\ntransfer-encoding: chunked" not in header:
            self.fail("protocol", "the answer has neither a Content-Length nor chunks")
            return False
        length = 0 if self._chunked else int(header[length_at + 17 : header.find(b"\r", length_at + 2)])
        self._needed = end + 4 + length
        if b"\r\nconnection: close" in header:
            self.usable = False
        return True

    def _finish(self) -> None:
        received, self._received = self._received, bytearray()
        body_at = received.find(b"\r\n\r\n") + 4
        self._needed = 0
        assert self._answer is not None
        status = bytes(received[_STATUS])
        if status != b"200":
            kind = f"http {status.decode('ascii', 'replace')}"
        elif received.startswith(_ERROR_BODY, body_at):
            kind = "error in a 200 answer"
        else:
            self._answer.set_result(self._result(received, body_at))
            return
        self._answer.set_exception(RequestFailed(kind, error_text(bytes(received[body_at:]))))

    def _result(self, received: bytearray, body_at: int) -> Any:
        """What `request` returns of a whole answer: nothing is kept of it here."""
        return None


def error_text(body: bytes) -> str:
    """Triton's `{"error": ...}`, OpenAI's with a message in it, or the beginning of what a proxy said."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return body[:300].decode("utf-8", "replace")


def skip_chunks(received: bytearray, position: int) -> int:
    """Where the next chunk begins that is not whole yet, or is the last one (of length 0).

    Args:
        received: the answer so far.
        position: where a chunk begins: at its length in hexadecimal.
    """
    while (line_end := received.find(b"\r\n", position)) >= 0:
        size = int(received[position:line_end].split(b";")[0], 16)
        next_chunk = line_end + 2 + size + 2
        if size == 0 or next_chunk > len(received):
            break
        position = next_chunk
    return position


class HttpSender:
    """A pool of connections to one server; grows to the number of requests in flight.

    Args:
        address: `host:port`.
        timeout_s: seconds from sending a request to the end of its answer.
    """

    connection_type: type[HttpConnection] = HttpConnection

    def __init__(self, address: str, timeout_s: float) -> None:
        host, _, port = address.rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)
        self._timeout_s = timeout_s
        self._idle: list[HttpConnection] = []
        self._all: set[HttpConnection] = set()
        self._watchdog: asyncio.Task[None] | None = None

    async def open(self, connections: int) -> None:
        """Open `connections` at once, so that no measured request pays for a handshake."""
        self._watchdog = asyncio.create_task(self._watch())
        attempts = (self._connect() for _ in range(connections))
        opened = await asyncio.gather(*attempts, return_exceptions=True)
        # One that cannot be opened is tried again by the request that needs it, and counted there.
        self._idle = [connection for connection in opened if isinstance(connection, HttpConnection)]

    async def send(self, payload: bytes) -> Any:
        """Send one request and return what its connection does; raises `RequestFailed` when it fails."""
        connection = self._idle.pop() if self._idle else await self._connect()
        while not connection.usable:  # dropped by the server while idle
            self._all.discard(connection)
            connection = self._idle.pop() if self._idle else await self._connect()
        try:
            return await connection.request(payload)
        finally:
            if connection.usable:
                self._idle.append(connection)
            else:
                self._all.discard(connection)

    async def close(self) -> None:
        if self._watchdog is not None:
            self._watchdog.cancel()
        for connection in self._all:
            connection.close()
        self._all.clear()
        self._idle.clear()
        await asyncio.sleep(0)  # lets the transports run their connection_lost

    async def _connect(self) -> HttpConnection:
        loop = asyncio.get_running_loop()
        try:
            opening = loop.create_connection(self.connection_type, self._host, self._port)
            _, connection = await asyncio.wait_for(opening, self._timeout_s)
        except (OSError, asyncio.TimeoutError) as error:
            raise RequestFailed("connection", str(error) or "connecting took too long") from None
        self._all.add(connection)
        return connection

    async def _watch(self) -> None:
        """One timer for all connections: a timer per request would cost more than the request."""
        while True:
            await asyncio.sleep(min(self._timeout_s / 10, 0.5))
            oldest = time.monotonic() - self._timeout_s
            for connection in list(self._all):
                if 0 < connection.started_s < oldest:
                    connection.fail("timeout", f"no answer in {self._timeout_s:g} s")
