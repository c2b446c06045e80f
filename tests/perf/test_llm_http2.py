"""Frames and header blocks, against the examples of the RFCs; what comes in pieces is put together."""

from __future__ import annotations

import asyncio

import pytest

from perf.errors import RequestFailed
from perf.llm import http2
from perf.llm.grpc_connection import GrpcConnection, GrpcReceived

PATH = "/inference.GRPCInferenceService/ModelStreamInfer"


def test_a_frame_has_length_kind_flags_and_stream() -> None:
    assert http2.frame(http2.DATA, http2.END_STREAM, 5, b"ab") == bytes.fromhex("000002 00 01 00000005") + b"ab"
    assert http2.window_update(0, 1) == bytes.fromhex("000004 08 00 00000000 00000001")
    assert http2.settings([(1, 0), (4, 65_536)]) == bytes.fromhex("00000c 04 00 00000000 0001 00000000 0004 00010000")
    assert http2.read_settings(bytes.fromhex("0001 00000000 0004 00010000")) == {1: 0, 4: 65_536}
    assert http2.unpadded(http2.PADDED, b"\x02abcd\0\0") == b"abcd" and http2.unpadded(0, b"ab") == b"ab"


@pytest.mark.parametrize(("value", "bits", "coded"), [(10, 5, "0a"), (1337, 5, "1f9a0a"), (42, 8, "2a")])
def test_integers_of_rfc_7541_c_1(value: int, bits: int, coded: str) -> None:
    assert http2._integer(value, bits).hex() == coded
    assert http2._read_integer(bytes.fromhex(coded), 0, bits) == (value, len(coded) // 2)


@pytest.mark.parametrize(
    ("block", "fields"),
    [
        ("400a637573746f6d2d6b65790d637573746f6d2d686561646572", [(b"custom-key", b"custom-header")]),  # C.2.1
        ("040c2f73616d706c652f70617468", []),  # C.2.2: a name of the static table
        ("100870617373776f726406736563726574", [(b"password", b"secret")]),  # C.2.3
        ("82", []),  # C.2.4
        ("20" + "000b" + b"grpc-status".hex() + "0130", [(b"grpc-status", b"0")]),  # after a size of the table
        ("000161" + "81ff", [(b"a", b"huffman:\xff")]),
    ],
)
def test_header_fields_of_rfc_7541_c_2(block: str, fields: list[tuple[bytes, bytes]]) -> None:
    assert list(http2.literal_headers(bytes.fromhex(block))) == fields


def test_a_damaged_header_block_is_an_error_of_its_own() -> None:
    whole = bytes.fromhex("400a637573746f6d2d6b65790d637573746f6d2d686561646572")
    for cut in range(1, len(whole)):
        with pytest.raises(ValueError, match="middle of a field"):
            list(http2.literal_headers(whole[:cut]))


class _Transport(asyncio.Transport):
    """Takes what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview) -> None:  # type: ignore[override]
        self.written += data

    def close(self) -> None:
        self.closed = True


def _messages(*texts: bytes) -> bytes:
    return b"".join(b"\0" + len(text).to_bytes(4, "big") + text for text in texts)


def _status(text: bytes) -> bytes:
    return b"\0\x0bgrpc-status" + bytes((len(text),)) + text


def play(pieces: list[bytes], payload: bytes = b"question") -> tuple[GrpcReceived, _Transport]:
    """One call on stream 1, to which the server sends these pieces."""

    async def main() -> tuple[GrpcReceived, _Transport]:
        connection, transport = GrpcConnection("host:1", PATH), _Transport()
        connection.connection_made(transport)
        call = asyncio.create_task(connection.call(payload, 30))
        await asyncio.sleep(0)
        for piece in pieces:
            connection.data_received(piece)
        return await call, transport

    return asyncio.run(main())


STREAM = (
    http2.settings([])
    + http2.frame(http2.HEADERS, http2.END_HEADERS, 1, b"\x88")
    + http2.frame(http2.DATA, 0, 1, _messages(b"first", b"")[:3])
    + http2.frame(http2.PING, 0, 0, b"12345678")
    + http2.frame(http2.DATA, http2.PADDED, 1, b"\x04" + _messages(b"first", b"")[3:] + bytes(4))
    + http2.frame(http2.DATA, 0, 9, _messages(b"of a call that is gone"))
    + http2.frame(http2.DATA, 0, 1, _messages(b"last"))
    + http2.frame(http2.HEADERS, http2.END_STREAM, 1, _status(b"0")[:4])
    + http2.frame(http2.CONTINUATION, http2.END_HEADERS, 1, _status(b"0")[4:])
)


@pytest.mark.parametrize("size", [1, 7, 9, len(STREAM)])
def test_responses_are_put_together_however_they_are_cut(size: int) -> None:
    received, transport = play([STREAM[at : at + size] for at in range(0, len(STREAM), size)])
    assert received.messages == [b"first", b"", b"last"]
    assert received.stamps_ns == sorted(received.stamps_ns) and len(received.stamps_ns) == 3
    assert http2.frame(http2.PING, http2.ACK, 0, b"12345678") in transport.written
    assert http2.frame(http2.SETTINGS, http2.ACK, 0) in transport.written
    assert http2.frame(http2.DATA, http2.END_STREAM, 1, _messages(b"question")) in transport.written


def test_a_request_waits_for_the_servers_windows() -> None:
    small = http2.settings([(http2.INITIAL_WINDOW_SIZE, 10)])
    payload = bytes(70_000)
    end = http2.frame(http2.HEADERS, http2.END_STREAM | http2.END_HEADERS, 1, _status(b"0"))
    more = http2.window_update(0, 100_000) + http2.window_update(1, 100_000)
    _, transport = play([small, more, end], payload)
    sent, at = [], len(http2.PREFACE)
    while at < len(transport.written):
        length = int.from_bytes(transport.written[at : at + 3], "big")
        if transport.written[at + 3] == http2.DATA:
            sent.append((length, transport.written[at + 4] & http2.END_STREAM))
        at += http2.HEADER_BYTES + length
    # The window before the settings, then, far below it, nothing until the updates.
    assert [size for size, _ in sent[:4]] == [16_384, 16_384, 16_384, 16_383]
    assert sum(size for size, _ in sent) == 70_005 and [last for _, last in sent] == [0] * (len(sent) - 1) + [1]


@pytest.mark.parametrize(
    ("frames", "kind"),
    [
        (http2.frame(http2.HEADERS, 5, 1, _status(b"14") + b"\0\x0cgrpc-message\x05a%20b"), "grpc UNAVAILABLE: a b"),
        (http2.frame(http2.HEADERS, 5, 1, _status(b"99")), "grpc 99: "),
        (http2.frame(http2.HEADERS, 5, 1, b"\x88"), "grpc unknown: "),
        (http2.frame(http2.RST_STREAM, 0, 1, b"\0\0\0\x07"), "grpc reset: code 7"),
        (
            http2.frame(http2.HEADERS, 5, 1, b"\0\x0b"),
            "connection: no HTTP/2: a header block ends in the middle of a field",
        ),
    ],
)
def test_every_other_end_is_a_failure(frames: bytes, kind: str) -> None:
    with pytest.raises(RequestFailed) as failed:
        play([frames])
    assert str(failed.value) == kind


def test_a_broken_connection_fails_its_calls() -> None:
    async def main() -> None:
        connection, transport = GrpcConnection("host:1", PATH), _Transport()
        connection.connection_made(transport)
        call = asyncio.create_task(connection.call(b"x", 30))
        await asyncio.sleep(0)
        connection.data_received(http2.frame(http2.GOAWAY, 0, 0, bytes(8)))
        assert not connection.usable and not call.done()  # what is under way may end
        connection.connection_lost(None)
        await call

    with pytest.raises(RequestFailed, match="closed by the server"):
        asyncio.run(main())
