"""A language model over Triton's gRPC stream: messages are stamped as they come, and read after the run."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from perf.errors import RequestFailed
from perf.grpc_sender import GrpcSender
from perf.llm.answers import NO_USAGE, Answer, Piece, chunks_of
from perf.records import ErrorKind

_METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"
_ERROR_TAG = 0x0A  # a message that begins with it has an error text: field 1


@dataclass(frozen=True)
class GrpcReceived:
    """The messages of one stream, and when each came."""

    stamps_ns: list[int]
    messages: list[bytes]

    @property
    def failed(self) -> bool:
        """True when a message is an error."""
        return any(message[:1] == bytes((_ERROR_TAG,)) for message in self.messages)


class GrpcStreamSender(GrpcSender):
    """A stream for each request, all on one connection."""

    def _make_method(self, channel: Any) -> Any:
        # One message from us and the end of our side are, on the wire, what a call with a single request sends.
        return channel.unary_stream(_METHOD)

    async def _call(self, payload: bytes) -> GrpcReceived:
        received = GrpcReceived([], [])
        async for message in self._method(payload, timeout=self._timeout_s):
            received.stamps_ns.append(time.perf_counter_ns())
            received.messages.append(message)
        if not received.messages:
            raise RequestFailed("empty stream", "the stream ended without a response")
        return received


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
    """Takes the counts of one response, which stand for the whole answer so far; returns whether it brought text."""
    has_text = False
    for tensor, content in zip(response.outputs, response.raw_output_contents, strict=False):
        if tensor.name == "text_output":
            has_text = len(content) > 4  # the length of the text comes before it
        elif tensor.datatype == "UINT32" and content:
            counts[tensor.name] = int.from_bytes(content[:4], "little")
    return has_text


def error_kind(message: str) -> ErrorKind:
    """Our backend's "[kind:field] what" by its kind; other texts as they are."""
    kind, closed, _ = message.removeprefix("[").partition("]")
    if message.startswith("[") and closed and " " not in kind:
        return ErrorKind(f"stream {kind}", message)
    return ErrorKind("stream error", message)
