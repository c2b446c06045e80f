"""`AsyncHttpClient`: a Triton server over HTTP for asyncio, through aiohttp."""

from __future__ import annotations

import asyncio
import io
import time
import weakref
from typing import Any

from clients.async_base import AsyncTritonClient
from clients.async_streams import AsyncSource
from clients.errors import ClientClosed, ClientError, MissingDependency, ServerUnavailable, StreamBroken
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

# Further calls wait for a connection; streams, which keep theirs for long, are not counted.
CONNECTIONS = 100
# The longest line of an answer is twice this.
_BUFFER_BYTES = 8 * 2**20
_LARGE_BYTES = 2**18


class AsyncHttpClient(AsyncTritonClient):
    """A Triton server over HTTP. Calls share up to 100 connections; each stream has one of its own."""

    _protocol = HttpProtocol()

    def __init__(self, url: str, timeout_s: float = 60.0, retries: RetryPolicy | None = None) -> None:
        super().__init__(url, timeout_s, retries)
        self._sessions: dict[str, Any] = {}
        self._responses: weakref.WeakSet[Any] = weakref.WeakSet()  # of which the body may still be read

    async def _send(self, call: Call[Any], timeout_s: float) -> HttpAnswer:
        session = self._session("calls")
        try:
            async with self._request(session, call.method, call.request, timeout_s) as response:
                self._responses.add(response)
                body = await response.read()
        except (OSError, asyncio.TimeoutError, self._error()) as error:
            raise self._failure(error, timeout_s) from error
        if response.status != 200:
            raise status_error(response.status, response.reason or "", body)
        length = response.headers.get(HEADER_LENGTH)
        return HttpAnswer(body, None if length is None else int(length))

    async def _start(self, request: InferRequest, timeout_s: float) -> AsyncSource:
        session = self._session("streams")
        end = time.monotonic() + timeout_s
        try:
            response = await self._request(session, "POST", generate_call(request), timeout_s)
            self._responses.add(response)
            body = b"" if response.status == 200 else await response.read()
        except (OSError, asyncio.TimeoutError, self._error()) as error:
            raise self._failure(error, timeout_s) from error
        if response.status != 200:
            raise status_error(response.status, response.reason or "", body)
        return _HttpSource(self, response, end)

    def _request(self, session: Any, method: str, request: HttpRequest, timeout_s: float) -> Any:
        import aiohttp
        from yarl import URL

        return session.request(
            method,
            URL(f"http://{self.url}{request.path}", encoded=True),
            # A large body at once would hold up the event loop.
            data=io.BytesIO(request.body) if len(request.body) > _LARGE_BYTES else request.body or None,
            headers=dict(request.headers),
            timeout=aiohttp.ClientTimeout(total=timeout_s),
        )

    def _session(self, kind: str) -> Any:
        if self._closed:
            raise ClientClosed(self.url)
        self._bind_loop()
        if kind not in self._sessions:
            self._error()
            import aiohttp

            connector = aiohttp.TCPConnector(limit=CONNECTIONS if kind == "calls" else 0)
            self._sessions[kind] = aiohttp.ClientSession(
                connector=connector,
                read_bufsize=_BUFFER_BYTES,
                # aiohttp offers gzip, and Triton takes it: 5 MiB of floats took it two seconds.
                headers={"Accept-Encoding": "identity"},
            )
        return self._sessions[kind]

    @staticmethod
    def _error() -> type[Exception]:
        """What aiohttp raises; its absence is told with a hint."""
        try:
            import aiohttp
        except ImportError as error:
            raise MissingDependency(
                f"this client needs aiohttp ({error}); install it: pip install 'tritonclient[http]'"
            ) from error
        found: type[Exception] = aiohttp.ClientError
        return found

    def _failure(self, error: BaseException, timeout_s: float) -> ClientError:
        """The error of an exchange that broke off."""
        import aiohttp

        if self._closed:
            return ClientClosed(self.url, sent=True)
        if isinstance(error, asyncio.TimeoutError):
            return timed_out(self.url, timeout_s)
        if isinstance(error, aiohttp.ClientPayloadError):
            return StreamBroken(self.url, str(error))
        sent = not isinstance(error, aiohttp.ClientConnectorError)
        return ServerUnavailable(self.url, str(error) or type(error).__name__, sent=sent)

    async def _close(self) -> None:
        closed = self._error()("this client was closed")
        for response in list(self._responses):
            response.content.set_exception(closed)  # aiohttp leaves who reads a body waiting until its time limit
        for session in self._sessions.values():
            await session.close()


class _HttpSource(AsyncSource):
    """The server-sent events of one request of `generate_stream`."""

    def __init__(self, client: AsyncHttpClient, response: Any, end: float) -> None:
        self._client = client
        self._response = response
        self._end = end

    async def read(self) -> GetOutput | None:
        address = self._client.url
        while True:
            try:
                line = await self._response.content.readline()
            except asyncio.TimeoutError as error:
                raise timed_out(address, max(0.0, self._end - time.monotonic())) from error
            except (OSError, ValueError, RuntimeError, self._client._error()) as error:
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
        self._response.close()
