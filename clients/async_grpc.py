"""`AsyncGrpcClient`: a Triton server over gRPC for asyncio, with one connection for all calls."""

from __future__ import annotations

import asyncio
from typing import Any

from clients.async_base import AsyncTritonClient
from clients.async_streams import AsyncSource
from clients.errors import ClientClosed, ClientError, ServerUnavailable, StreamBroken
from clients.generation import GetOutput
from clients.grpc_messages import messages
from clients.grpc_protocol import (
    CHANNEL_OPTIONS,
    STREAM,
    GrpcProtocol,
    infer_message,
    multicallable,
    rpc_error,
)
from clients.protocol import Call
from clients.requests import InferRequest
from clients.retries import RetryPolicy
from clients.stream_messages import StreamMessages


class AsyncGrpcClient(AsyncTritonClient):
    """A Triton server over gRPC. Each call and each stream is one of its own on the one connection."""

    _protocol = GrpcProtocol()

    def __init__(self, url: str, timeout_s: float = 60.0, retries: RetryPolicy | None = None) -> None:
        super().__init__(url, timeout_s, retries)
        self._channel: Any = None
        self._methods: dict[str, Any] = {}

    async def _send(self, call: Call[Any], timeout_s: float) -> Any:
        import grpc

        method = self._method(call.method)
        try:
            return await method(call.request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise await self._failure(error) from error
        except asyncio.CancelledError:
            if self._closed:
                raise ClientClosed(self.url, sent=True) from None
            raise

    async def _start(self, request: InferRequest, timeout_s: float) -> AsyncSource:
        return _GrpcSource(self, self._method(STREAM)(infer_message(request), timeout=timeout_s))

    def _method(self, name: str) -> Any:
        if self._closed:
            raise ClientClosed(self.url)
        self._bind_loop()
        if self._channel is None:
            messages()  # whose absence is told with a hint
            import grpc.aio

            self._channel = grpc.aio.insecure_channel(self.url, options=CHANNEL_OPTIONS)
        if name not in self._methods:
            create = self._channel.unary_stream if name == STREAM else self._channel.unary_unary
            self._methods[name] = multicallable(create, name)
        return self._methods[name]

    async def _failure(self, error: Any) -> ClientError:
        """The error of a call. Triton says UNAVAILABLE of a model that is not ready, too: who answers is there."""
        status, details = error.code().name, str(error.details())
        if self._closed and status == "CANCELLED":
            return ClientClosed(self.url, sent=True)
        found = rpc_error(self.url, status, details)
        if status == "UNAVAILABLE" and not isinstance(found, ServerUnavailable) and not await self._is_live():
            return ServerUnavailable(self.url, details, sent=True)
        return found

    async def _is_live(self) -> bool:
        import grpc

        try:
            answer = await self._method("ServerLive")(messages().ServerLiveRequest(), timeout=min(self.timeout_s, 5.0))
        except (grpc.RpcError, ServerUnavailable):
            return False
        return bool(answer.live)

    async def _close(self) -> None:
        if self._channel is not None:
            await self._channel.close()


class _GrpcSource(AsyncSource):
    """The responses of one stream of gRPC."""

    def __init__(self, client: AsyncGrpcClient, call: Any) -> None:
        self._client = client
        self._call = call
        self._messages = StreamMessages()

    async def read(self) -> GetOutput | None:
        import grpc

        try:
            message = await self._call.read()
        except grpc.RpcError as error:
            failure = await self._client._failure(error)
            if isinstance(failure, ServerUnavailable) and failure.sent:
                raise StreamBroken(self._client.url, str(error.details())) from error
            raise failure from error
        except asyncio.CancelledError:
            if self._client._closed:
                raise StreamBroken(self._client.url, "this client was closed") from None
            raise
        if message is grpc.aio.EOF:
            return None
        return self._messages.read(message)

    def cancel(self) -> None:
        self._call.cancel()
