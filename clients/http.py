"""`HttpClient`: a Triton server over HTTP, for threads.

The connection is Python's own. tritonclient's is a gevent hub per thread, whose descriptors stay open after the thread
has ended, and takes no timeout for one call.
"""

from __future__ import annotations

import contextlib
import http.client
import select
import socket
import time
import weakref
from typing import Any

from clients.base import TritonClient
from clients.errors import ClientClosed, ClientError, ServerUnavailable, StreamBroken
from clients.generation import GetOutput
from clients.http_protocol import (
    HEADER_LENGTH,
    HttpAnswer,
    HttpProtocol,
    HttpRequest,
    generate_call,
    read_event,
    status_error,
    timed_out,
)
from clients.protocol import Call
from clients.requests import InferRequest
from clients.retries import RetryPolicy
from clients.streams import Source

_PIECE_BYTES = 2**20


class HttpClient(TritonClient):
    """A Triton server over HTTP. Each thread keeps one connection open; each stream has one of its own."""

    _protocol = HttpProtocol()

    def __init__(self, url: str, timeout_s: float = 60.0, retries: RetryPolicy | None = None) -> None:
        super().__init__(url, timeout_s, retries)
        self._streams: weakref.WeakSet[_HttpSource] = weakref.WeakSet()

    def close(self) -> None:
        """Close every connection, those of open streams too. A second call does nothing; a later request raises."""
        super().close()
        for stream in list(self._streams):
            stream.cancel()

    def _connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.url, timeout=self.timeout_s)

    def _send(self, call: Call[Any], timeout_s: float) -> HttpAnswer:
        connection: http.client.HTTPConnection = self._connection()
        end = time.monotonic() + timeout_s
        try:
            response, used = self._exchange(connection, call.method, call.request, timeout_s)
            body = _read_body(response, used, end)
        except BaseException as error:
            connection.close()  # or the next call would read this one's answer
            if isinstance(error, (OSError, http.client.HTTPException)):
                raise self._failure(error, timeout_s) from error
            raise
        if response.status != 200:
            raise status_error(response.status, response.reason, body)
        length = response.headers.get(HEADER_LENGTH)
        return HttpAnswer(body, None if length is None else int(length))

    def _start(self, request: InferRequest, timeout_s: float) -> Source:
        if self._closed:
            raise ClientClosed(self.url)
        connection = self._connect()
        end = time.monotonic() + timeout_s
        try:
            response, used = self._exchange(connection, "POST", generate_call(request), timeout_s)
            body = b"" if response.status == 200 else _read_body(response, used, end)
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise self._failure(error, timeout_s) from error
        if response.status != 200:
            connection.close()
            raise status_error(response.status, response.reason, body)
        stream = _HttpSource(self, connection, response, end)
        self._streams.add(stream)
        return stream

    def _exchange(
        self, connection: http.client.HTTPConnection, method: str, request: HttpRequest, timeout_s: float
    ) -> tuple[http.client.HTTPResponse, socket.socket]:
        """Send a request and read the head of the answer; returns the connection's socket, too.

        Raises:
            ServerUnavailable: no connection can be made; nothing was sent.
        """
        if connection.sock is not None and _was_dropped(connection.sock):
            connection.close()
        connection.timeout = timeout_s
        if connection.sock is None:
            try:
                connection.connect()
            except TimeoutError as error:
                raise timed_out(self.url, timeout_s) from error
            except OSError as error:
                raise ServerUnavailable(self.url, str(error)) from error
        used = connection.sock
        used.settimeout(timeout_s)
        connection.request(method, request.path, body=request.body, headers=dict(request.headers))
        return connection.getresponse(), used

    def _failure(self, error: Exception, timeout_s: float) -> ClientError:
        """The error of an exchange that broke off."""
        if self._closed:
            return ClientClosed(self.url, sent=True)
        if isinstance(error, TimeoutError):
            return timed_out(self.url, timeout_s)
        if isinstance(error, http.client.IncompleteRead):
            return StreamBroken(self.url, str(error))
        return ServerUnavailable(self.url, str(error) or type(error).__name__, sent=True)


class _HttpSource(Source):
    """The server-sent events of one request of `generate_stream`."""

    def __init__(
        self, client: HttpClient, connection: http.client.HTTPConnection, response: http.client.HTTPResponse, end: float
    ) -> None:
        self._client = client
        self._socket = connection.sock
        self._connection = connection
        self._response = response
        self._end = end

    def read(self) -> GetOutput | None:
        address = self._client.url
        while True:
            left = self._end - time.monotonic()
            if left <= 0:
                raise timed_out(address, 0)
            try:
                self._socket.settimeout(left)
                line = self._response.readline()
            except TimeoutError as error:
                raise timed_out(address, left) from error
            except (OSError, http.client.HTTPException) as error:
                if self._client._closed:
                    raise StreamBroken(address, "this client was closed") from error
                raise StreamBroken(address, str(error) or type(error).__name__) from error
            if not line:
                return None
            try:
                get = read_event(line)
            except ValueError as error:
                raise StreamBroken(address, f"an event cannot be read: {error}") from error
            if get is not None:
                return get

    def drop(self) -> None:
        with contextlib.suppress(OSError):  # it has ended
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes a thread that is reading, which closing would not

    def __del__(self) -> None:
        self._response.close()
        self._connection.close()


def _read_body(response: http.client.HTTPResponse, used: socket.socket, end: float) -> bytes:
    """The rest of an answer, read until `end`: a socket's own time limit begins anew with each byte that comes.

    Raises:
        TimeoutError: `end` (`time.monotonic`) is reached.
        http.client.IncompleteRead: the connection ended before.
    """
    pieces: list[bytes] = []
    while response.length:  # None where the server does not say it, which Triton does
        left_s = end - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        used.settimeout(left_s)
        piece = response.read1(_PIECE_BYTES)
        if not piece:
            raise http.client.IncompleteRead(b"".join(pieces), response.length)
        pieces.append(piece)
    pieces.append(response.read())  # lets the connection go for the next request
    return b"".join(pieces)


def _was_dropped(idle: socket.socket) -> bool:
    """Whether the server has closed an idle connection, which it may do at any time: then it can be read from."""
    try:
        poll = select.poll()
        poll.register(idle, select.POLLIN)
        return bool(poll.poll(0))
    except (OSError, ValueError):
        return True
