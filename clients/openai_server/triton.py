"""Triton over gRPC, without threads: streams and calls over a few connections that all requests share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio
from tritonclient.grpc import service_pb2, service_pb2_grpc

from clients.openai_server.errors import error_from_engine, error_from_rpc

# A stream of its own for each request, since Triton cancels by stream; they share connections, which take thousands.
_NUM_CHANNELS = 2
_OPTIONS = [
    ("grpc.max_send_message_length", 2**31 - 1),
    ("grpc.max_receive_message_length", 2**31 - 1),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.enable_http_proxy", 0),
]
_STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
_CLOSING_S = 1.0  # how long Triton may take to close a stream that it ended with an error
_CALL_S = 10.0  # for a question about the server

InferRequest = Any  # service_pb2.ModelInferRequest
InferResponse = Any  # service_pb2.ModelInferResponse


class Triton:
    """A Triton server.

    Args:
        address: `host:port`.
    """

    def __init__(self, address: str) -> None:
        self._channels = [grpc.aio.insecure_channel(address, options=_OPTIONS) for _ in range(_NUM_CHANNELS)]
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channels[0])
        # A stream with one request: as an RPC with one message there is no half of it to be closed.
        self._streams = [
            channel.unary_stream(
                _STREAM,
                request_serializer=service_pb2.ModelInferRequest.SerializeToString,
                response_deserializer=service_pb2.ModelStreamInferResponse.FromString,
            )
            for channel in self._channels
        ]
        self._turn = 0

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()

    async def is_ready(self) -> bool:
        """Returns whether the server answers and says that it is ready."""
        try:
            answer = await self._stub.ServerReady(service_pb2.ServerReadyRequest(), timeout=_CALL_S)
        except grpc.aio.AioRpcError:
            return False
        return bool(answer.ready)

    async def check_live(self) -> None:
        """Raises ApiError where no server answers."""
        await self._call(self._stub.ServerLive, service_pb2.ServerLiveRequest(), _CALL_S)

    async def newest_version(self, model: str) -> str | None:
        """Returns the newest version of a model that is ready, or None.

        Triton's list of all models is not asked for: it is closed where `compile serve` restarts models.
        """
        request = service_pb2.ModelMetadataRequest(name=model)
        try:
            answer = await self._stub.ModelMetadata(request, timeout=_CALL_S)
        except grpc.aio.AioRpcError:
            return None
        return max(answer.versions, key=int, default=None)

    async def config(self, model: str, version: str) -> Any:
        """Returns a model's ModelConfig."""
        request = service_pb2.ModelConfigRequest(name=model, version=version)
        return (await self._call(self._stub.ModelConfig, request, _CALL_S)).config

    async def infer(self, request: InferRequest, timeout_s: float) -> InferResponse:
        """Returns the one response to a request."""
        return await self._call(self._stub.ModelInfer, request, timeout_s)

    async def stream(self, request: InferRequest, timeout_s: float) -> AsyncIterator[InferResponse]:
        """Yields the responses to a request; ending the iteration early cancels it in the server.

        Raises:
            ApiError: the server refused it, failed, or was not there.
        """
        self._turn += 1
        call = self._streams[self._turn % _NUM_CHANNELS](request, timeout=timeout_s)
        try:
            while (answer := await call.read()) is not grpc.aio.EOF:
                if answer.error_message:
                    await _let_close(call)
                    raise error_from_engine(answer.error_message)
                yield answer.infer_response
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error.code().name, error.details() or "") from None
        finally:
            call.cancel()  # does nothing after the end

    async def _call(self, method: Any, request: Any, timeout_s: float) -> Any:
        try:
            return await method(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error.code().name, error.details() or "") from None


async def _let_close(call: Any) -> None:
    """Reads to the end: a cancel while Triton closes a stream can make it count the request as under way for ever."""

    async def rest() -> None:
        while await call.read() is not grpc.aio.EOF:
            pass

    with suppress(grpc.aio.AioRpcError, asyncio.TimeoutError):
        await asyncio.wait_for(rest(), _CLOSING_S)
