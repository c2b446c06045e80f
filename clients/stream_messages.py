"""Reads the messages of one stream of gRPC, one for each token: by comparing bytes, where protobuf would parse.

    0x12 LENGTH | name, version, id, parameters, outputs: the head | 0x32 LENGTH contents | 0x32 LENGTH contents | ...

From one response of a stream to the next the head hardly ever changes: it says which outputs there are, of which types
and shapes. So it is parsed once, and a message that begins with the same bytes has the same outputs.
"""

from __future__ import annotations

from typing import Any

from clients.errors import server_error
from clients.generation import GetOutput
from clients.grpc_messages import messages
from clients.tensors import decode_values

_INFER_RESPONSE = 0x12  # field 2 of ModelStreamInferResponse
_CONTENTS = 0x32  # field 6 of ModelInferResponse, the last one


class StreamMessages:
    """What is remembered from one message to the next."""

    def __init__(self) -> None:
        self._head = b""
        self._places: dict[str, tuple[int, str]] = {}

    def read(self, message: bytes) -> GetOutput:
        """The outputs of a serialised `ModelStreamInferResponse`, decoded when they are asked for.

        Raises:
            ServerError: the message is an error.
        """
        contents = self._contents(message) if self._head else None
        if contents is None:
            contents = self._parse(message)
        places = self._places

        def get(name: str) -> list[Any] | None:
            found = places.get(name)
            return None if found is None else decode_values(contents[found[0]], found[1])

        return get

    def _contents(self, message: bytes) -> list[bytes] | None:
        """The contents of the outputs; None where the head is another one."""
        try:
            if message[0] != _INFER_RESPONSE:
                return None
            length, at = _varint(message, 1)
            if not message.startswith(self._head, at) or at + length != len(message):
                return None
            return _split(message, at + len(self._head))
        except IndexError:
            return None

    def _parse(self, message: bytes) -> list[bytes]:
        """The same through protobuf; remembers the head."""
        parsed = messages().ModelStreamInferResponse.FromString(message)
        if parsed.error_message:
            raise server_error("ERROR", parsed.error_message)
        answer = parsed.infer_response
        contents = list(answer.raw_output_contents)
        self._places = {output.name: (place, output.datatype) for place, output in enumerate(answer.outputs)}
        del answer.raw_output_contents[:]
        head: bytes = answer.SerializeToString()
        self._head = head
        return contents


def _split(message: bytes, at: int) -> list[bytes] | None:
    found = []
    while at < len(message):
        if message[at] != _CONTENTS:
            return None
        length, begin = _varint(message, at + 1)
        at = begin + length
        found.append(message[begin:at])
    return found if at == len(message) else None


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """A number of protobuf's, and where it ends."""
    value = message[at]
    if value < 0x80:
        return value, at + 1
    value &= 0x7F
    shift = 7
    while True:
        at += 1
        byte = message[at]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at + 1
        shift += 7
