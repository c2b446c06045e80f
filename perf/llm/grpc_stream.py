"""A language model over Triton's gRPC stream: messages are stamped as they come, and read after the run."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

from perf.errors import RequestFailed
from perf.llm.answers import NO_USAGE, Answer, Piece, chunks_of
from perf.llm.grpc_connection import GrpcConnection, GrpcReceived
from perf.records import ErrorKind

_METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"


class GrpcStreamSender:
    """A stream for each request, all on one connection, which is made anew when it breaks.

    One message from us and the end of our side are, on the wire, what a call with a single request sends.

    Args:
        address: `host:port`.
        timeout_s: seconds that one request may take.
    """

    def __init__(self, address: str, timeout_s: float) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._connection: asyncio.Future[GrpcConnection] | None = None

    async def open(self, connections: int) -> None:
        """Connect, so that no measured request pays for it. `connections` is for HTTP: gRPC shares one."""
        # A server that is not there is for the requests to find out, and counted there.
        with contextlib.suppress(RequestFailed):
            await self._connect()

    async def send(self, payload: bytes) -> GrpcReceived:
        """Send one request and return what came; raises `RequestFailed` when it fails."""
        connection = await self._connect()
        received = await connection.call(payload, self._timeout_s)
        if not received.messages:
            raise RequestFailed("empty stream", "the stream ended without a response")
        return received

    async def close(self) -> None:
        if self._connection is not None and self._connection.done() and not self._connection.exception():
            self._connection.result().close()
            await asyncio.sleep(0)  # lets the transport run its connection_lost

    async def _connect(self) -> GrpcConnection:
        """The connection in use; the first that needs a new one makes it, and the others wait for it."""
        current = self._connection
        broken = current is None or (current.done() and (current.exception() or not current.result().usable))
        if current is None or broken:
            current = self._connection = asyncio.ensure_future(self._open_one())
        return await asyncio.shield(current)

    async def _open_one(self) -> GrpcConnection:
        host, _, port = self._address.rpartition(":")
        opening = asyncio.get_running_loop().create_connection(
            lambda: GrpcConnection(self._address, _METHOD), host.strip("[]"), int(port)
        )
        try:
            _, connection = await asyncio.wait_for(opening, self._timeout_s)
        except (OSError, asyncio.TimeoutError) as error:
            raise RequestFailed("connection", str(error) or "connecting took too long") from None
        return connection


def read_grpc(received: GrpcReceived) -> Answer:
    """What the messages say."""
    from tritonclient.grpc import service_pb2

    pieces: list[Piece] = []
    counts: dict[str, int] = {}
    for at_ns, message in zip(received.stamps_ns, received.messages, strict=True):
        response = service_pb2.ModelStreamInferResponse.FromString(message)
        if response.error_message:
            return Answer(error=error_kind(response.error_message))
        has_text = _read_outputs(response.infer_response, counts)
        pieces.append(Piece(at_ns, has_text, counts.get("num_output_tokens")))
    found = chunks_of(pieces)
    if found is None:
        return Answer(error=NO_USAGE)
    return Answer(found[0], counts.get("num_input_tokens"), counts.get("num_cached_tokens"), counted=found[1])


def _read_outputs(response: Any, counts: dict[str, int]) -> bool:
    """Adds the counts of one response, whose output tokens are its own alone; returns whether it brought text."""
    has_text = False
    for tensor, content in zip(response.outputs, response.raw_output_contents, strict=False):
        if tensor.name == "text_output":
            has_text = len(content) > 4  # the length of the text comes before it
        elif tensor.name == "usage":
            end = json.loads(content[4:])
            counts |= {"num_input_tokens": end["prompt_tokens"], "num_cached_tokens": end["cached_tokens"]}
        elif tensor.datatype == "UINT32" and content:
            before = counts.get(tensor.name, 0) if tensor.name == "num_output_tokens" else 0
            counts[tensor.name] = before + int.from_bytes(content[:4], "little")
    return has_text


def error_kind(message: str) -> ErrorKind:
    """Our backend's "[kind:field] what" by its kind; other texts as they are."""
    kind, closed, _ = message.removeprefix("[").partition("]")
    if message.startswith("[") and closed and " " not in kind:
        return ErrorKind(f"stream {kind}", message)
    return ErrorKind("stream error", message)
