"""One HTTP/2 connection that carries gRPC calls with one request each and stamps their responses.

A third of the processor time of grpc.aio for each response, which it takes from the server it shares its cores with.
"""

from __future__ import annotations

import asyncio
import struct
import time
from dataclasses import dataclass, field
from urllib.parse import unquote

from perf.errors import RequestFailed
from perf.llm import http2

_STATUSES = (
    "OK",
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
)
_REFILL = 1 << 24  # bytes received between updates of a window of 2 GiB


@dataclass(frozen=True)
class GrpcReceived:
    """The messages of one call, and when each came."""

    stamps_ns: list[int]
    messages: list[bytes]

    @property
    def failed(self) -> bool:
        """True when a message is an error text: field 1 of a `ModelStreamInferResponse`."""
        return any(message[:1] == b"\x0a" for message in self.messages)


@dataclass
class _Call:
    """A call in flight. `unsent` waits for the server's windows, `unread` for the rest of a message."""

    done: asyncio.Future[GrpcReceived]
    window: int
    unsent: bytes = b""
    unread: bytes = b""
    received: GrpcReceived = field(default_factory=lambda: GrpcReceived([], []))


class GrpcConnection(asyncio.Protocol):
    """Calls of one method.

    Args:
        authority: `host:port`.
        path: of the method, "/package.Service/Method".
    """

    def __init__(self, authority: str, path: str) -> None:
        self.usable = True
        self._headers = http2.grpc_headers(authority, path)
        self._transport: asyncio.Transport | None = None
        self._unread = bytearray()
        self._calls: dict[int, _Call] = {}
        self._next_stream = 1
        self._window = http2.DEFAULT_WINDOW
        self._stream_window = http2.DEFAULT_WINDOW
        self._consumed = 0
        self._block, self._ends = b"", False  # the header block that is coming, and whether its call ends with it

    async def call(self, payload: bytes, timeout_s: float) -> GrpcReceived:
        """Make one call and wait for its end.

        Raises:
            RequestFailed: a status other than OK, a broken connection or a timeout.
        """
        if self._transport is None or not self.usable:
            raise RequestFailed("connection", "the connection is closed")
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        message = b"\0" + len(payload).to_bytes(4, "big") + payload
        call = _Call(asyncio.get_running_loop().create_future(), self._stream_window, message)
        self._calls[stream] = call
        self._transport.write(http2.frame(http2.HEADERS, http2.END_HEADERS, stream, self._headers))
        self._send(stream, call)
        try:
            return await asyncio.wait_for(call.done, timeout_s)
        except asyncio.TimeoutError:
            raise RequestFailed("timeout", f"no end of the answer in {timeout_s:g} s") from None
        finally:
            if self._calls.pop(stream, None) is not None and self.usable:
                cancel = http2.CANCEL.to_bytes(4, "big")
                self._transport.write(http2.frame(http2.RST_STREAM, 0, stream, cancel))

    def close(self) -> None:
        self._fail("closed by the client")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        ours = ((http2.HEADER_TABLE_SIZE, 0), (http2.ENABLE_PUSH, 0), (http2.INITIAL_WINDOW_SIZE, http2.MAX_WINDOW))
        widen = http2.window_update(0, http2.MAX_WINDOW - http2.DEFAULT_WINDOW)
        transport.write(http2.PREFACE + http2.settings(ours) + widen)

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(str(error) if error else "closed by the server")

    def data_received(self, data: bytes) -> None:
        now_ns = time.perf_counter_ns()
        unread = self._unread
        unread += data
        at = 0
        while len(unread) - at >= http2.HEADER_BYTES:
            end = at + http2.HEADER_BYTES + int.from_bytes(unread[at : at + 3], "big")
            if end > len(unread):
                break
            stream = int.from_bytes(unread[at + 5 : at + 9], "big") & http2.MAX_WINDOW
            payload = bytes(unread[at + http2.HEADER_BYTES : end])
            try:
                self._read_frame(unread[at + 3], unread[at + 4], stream, payload, now_ns)
            except (ValueError, struct.error) as error:
                self._fail(f"no HTTP/2: {error}")
                return
            at = end
        del unread[:at]

    def _read_frame(self, kind: int, flags: int, stream: int, payload: bytes, now_ns: int) -> None:
        call = self._calls.get(stream)
        if kind == http2.DATA:
            self._count(len(payload))
            if call is not None:
                _read_messages(call, http2.unpadded(flags, payload), now_ns)
        elif kind in (http2.HEADERS, http2.CONTINUATION):
            self._read_headers(kind, flags, stream, payload)
        elif kind == http2.RST_STREAM and call is not None:
            self._end(stream, RequestFailed("grpc reset", f"code {int.from_bytes(payload, 'big')}"))
        elif kind == http2.WINDOW_UPDATE:
            self._widen(stream, int.from_bytes(payload, "big") & http2.MAX_WINDOW)
        elif kind == http2.SETTINGS and not flags & http2.ACK:
            self._take_settings(http2.read_settings(payload))
        elif kind == http2.PING and not flags & http2.ACK:
            self._write(http2.frame(http2.PING, http2.ACK, 0, payload))
        elif kind == http2.GOAWAY:
            self.usable = False  # calls in flight are answered still

    def _read_headers(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        """The last header block of a call holds its status."""
        if kind == http2.HEADERS:
            payload = http2.unpadded(flags, payload)
            self._block, self._ends = payload[5 if flags & http2.PRIORITY else 0 :], bool(flags & http2.END_STREAM)
        else:
            self._block += payload
        if not (flags & http2.END_HEADERS and self._ends) or stream not in self._calls:
            return
        fields = dict(http2.literal_headers(self._block))
        status = fields.get(b"grpc-status", b"unknown").decode("ascii", "replace")
        if status == "0":
            self._end(stream, None)
            return
        name = _STATUSES[int(status)] if status.isdigit() and int(status) < len(_STATUSES) else status
        self._end(stream, RequestFailed(f"grpc {name}", unquote(fields.get(b"grpc-message", b"").decode("latin-1"))))

    def _end(self, stream: int, failure: RequestFailed | None) -> None:
        call = self._calls.pop(stream, None)
        if call is None or call.done.done():
            return
        if failure is not None:
            call.done.set_exception(failure)
        else:
            call.done.set_result(call.received)

    def _send(self, stream: int, call: _Call) -> None:
        """As much of the message as the server's windows allow."""
        while call.unsent and (size := min(len(call.unsent), self._window, call.window, http2.MAX_FRAME)) > 0:
            part, call.unsent = call.unsent[:size], call.unsent[size:]
            self._window -= size
            call.window -= size
            self._write(http2.frame(http2.DATA, 0 if call.unsent else http2.END_STREAM, stream, part))

    def _widen(self, stream: int, increment: int) -> None:
        if stream == 0:
            self._window += increment
        elif stream in self._calls:
            self._calls[stream].window += increment
        self._send_all()

    def _take_settings(self, values: dict[int, int]) -> None:
        if http2.INITIAL_WINDOW_SIZE in values:
            change = values[http2.INITIAL_WINDOW_SIZE] - self._stream_window
            self._stream_window += change
            for call in self._calls.values():
                call.window += change
        self._write(http2.frame(http2.SETTINGS, http2.ACK, 0))
        self._send_all()

    def _send_all(self) -> None:
        for stream, call in self._calls.items():
            self._send(stream, call)

    def _count(self, size: int) -> None:
        self._consumed += size
        if self._consumed >= _REFILL:
            self._write(http2.window_update(0, self._consumed))
            self._consumed = 0

    def _write(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data)

    def _fail(self, why: str) -> None:
        self.usable = False
        for stream in list(self._calls):
            self._end(stream, RequestFailed("connection", why))
        if self._transport is not None:
            self._transport.close()


def _read_messages(call: _Call, data: bytes, now_ns: int) -> None:
    """Takes the whole messages out of what came: a length of 5 bytes and the message, over and over."""
    data = call.unread + data if call.unread else data
    at = 0
    while len(data) - at >= 5:
        end = at + 5 + int.from_bytes(data[at + 1 : at + 5], "big")
        if end > len(data):
            break
        call.received.stamps_ns.append(now_ns)
        call.received.messages.append(data[at + 5 : end])
        at = end
    call.unread = data[at:]
