"""Sends pre-serialised `ModelInfer` requests over gRPC. No protobuf is written or read per request."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from perf.errors import PerfError, RequestFailed

_METHOD = "/inference.GRPCInferenceService/ModelInfer"
_CONNECT_S = 1.0
_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # Channels of one process to one address share a connection otherwise, also with those of a past level.
    ("grpc.use_local_subchannel_pool", 1),
)


class GrpcSender:
    """One HTTP/2 connection that carries all requests.

    Args:
        address: `host:port`.
        timeout_s: seconds that one request may take.
    """

    def __init__(self, address: str, timeout_s: float) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._channel: Any = None
        self._method: Any = None
        self._rpc_error: type[Exception] = Exception

    async def open(self, connections: int) -> None:
        """Connect, so that no measured request pays for it. `connections` is for HTTP: gRPC shares one."""
        try:
            import grpc.aio
        except ImportError as error:
            raise PerfError(f"gRPC needs grpcio ({error}); install it: pip install 'tritonclient[grpc]'") from error
        self._rpc_error = grpc.aio.AioRpcError
        self._channel = grpc.aio.insecure_channel(self._address, options=_OPTIONS)
        self._method = self._make_method(self._channel)
        # A server that is not there is for the requests to find out, and counted there.
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._channel.channel_ready(), min(self._timeout_s, _CONNECT_S))

    async def send(self, payload: bytes) -> Any:
        """Send one request and return what `_call` does; raises `RequestFailed` when it fails."""
        try:
            return await self._call(payload)
        except self._rpc_error as error:
            code = error.code().name  # type: ignore[attr-defined]
            kind = "timeout" if code == "DEADLINE_EXCEEDED" else f"grpc {code}"
            raise RequestFailed(kind, str(error.details())) from None  # type: ignore[attr-defined]

    def _make_method(self, channel: Any) -> Any:
        # Without serialisers bytes pass as they are. Triton's errors are statuses: any answer is a success.
        return channel.unary_unary(_METHOD)

    async def _call(self, payload: bytes) -> Any:
        """Make one call and wait for its end: nothing is kept of the answer here."""
        await self._method(payload, timeout=self._timeout_s)

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()
