"""`AsyncGrpcClient`: a Triton server over gRPC for asyncio, with one connection for all calls."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from clients.async_base import AsyncTritonClient
from clients.async_grpc_source import GrpcSource
from clients.errors import ClientClosed, ClientError, ServerUnavailable, StreamBroken
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
from clients.streams import CLOSING_S


class AsyncGrpcClient(AsyncTritonClient):
    """A Triton server over gRPC. Each call and each stream is one of its own on the one connection."""

    _protocol = GrpcProtocol()

    def __init__(self, url: str, timeout_s: float = 60.0, retries: RetryPolicy | None = None) -> None:
        super().__init__(url, timeout_s, retries)
        self._channel: Any = None
        self._methods: dict[str, Any] = {}
        self._leaving: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Ends the streams that were left, and closes the connection; see `AsyncTritonClient.close`."""
        if self._leaving:
            await asyncio.wait(self._leaving)
        await super().close()

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

    async def _start(self, request: InferRequest, timeout_s: float) -> GrpcSource:
        call = self._method(STREAM)(infer_message(request), timeout=timeout_s)
        return GrpcSource(call, self._broken, partial(self._leave, request.cancel) if request.cancel else None)

    async def _broken(self, error: Any) -> ClientError:
        """The error of a stream that broke off."""
        if isinstance(error, asyncio.CancelledError):
            return StreamBroken(self.url, "this client was closed" if self._closed else "it was dropped")
        failure = await self._failure(error)
        if isinstance(failure, ServerUnavailable) and failure.sent:
            return StreamBroken(self.url, str(error.details()))
        return failure

    def _leave(self, cancel: InferRequest, source: GrpcSource) -> None:
        """Has the server end an answer within CLOSING_S, and drops it where that fails; see `clients.leave`."""
        task = asyncio.create_task(self._end(cancel, source))
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def _end(self, cancel: InferRequest, source: GrpcSource) -> None:
        async def end() -> None:
            sent = await self._start(cancel, CLOSING_S)
            await sent.ended()
            await source.ended()

        try:
            await asyncio.wait_for(end(), CLOSING_S)
        except (ClientError, asyncio.TimeoutError):
            pass
        finally:
            source.drop()

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
