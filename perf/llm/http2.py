"""As much of HTTP/2 as a gRPC call with one request and many responses needs (RFC 9113, RFC 7541). Pure.

Frames as bytes, and header blocks written and read without a dynamic table, which the client forbids to the server.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM, ACK, END_HEADERS, PADDED, PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
HEADER_TABLE_SIZE, ENABLE_PUSH, INITIAL_WINDOW_SIZE = 1, 2, 4
MAX_WINDOW = 2**31 - 1
DEFAULT_WINDOW = 65_535
MAX_FRAME = 16_384
HEADER_BYTES = 9
CANCEL = 8

# Of the static table: what we send by its index.
_METHOD_POST, _SCHEME_HTTP, _AUTHORITY, _PATH, _CONTENT_TYPE = 3, 6, 1, 4, 31


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One frame."""
    return struct.pack(">I", len(payload) << 8 | kind)[:4] + struct.pack(">BI", flags, stream) + payload


def settings(values: Iterable[tuple[int, int]]) -> bytes:
    """A SETTINGS frame."""
    return frame(SETTINGS, 0, 0, b"".join(struct.pack(">HI", key, value) for key, value in values))


def window_update(stream: int, increment: int) -> bytes:
    """A WINDOW_UPDATE frame."""
    return frame(WINDOW_UPDATE, 0, stream, struct.pack(">I", increment))


def read_settings(payload: bytes) -> dict[int, int]:
    """The values of a SETTINGS frame."""
    return dict(struct.iter_unpack(">HI", payload))


def unpadded(flags: int, payload: bytes) -> bytes:
    """The content of a DATA or HEADERS frame, without padding."""
    if not flags & PADDED:
        return payload
    return payload[1 : len(payload) - payload[0]]


def grpc_headers(authority: str, path: str) -> bytes:
    """The header block of a call: literals that no table keeps."""
    return b"".join(
        (
            bytes((0x80 | _METHOD_POST, 0x80 | _SCHEME_HTTP)),
            _integer(_PATH, 4) + _string(path),
            _integer(_AUTHORITY, 4) + _string(authority),
            _integer(_CONTENT_TYPE, 4) + _string("application/grpc"),
            b"\0" + _string("te") + _string("trailers"),
        )
    )


def literal_headers(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The header fields of a block that have a name of their own, as grpc-status does; others are passed over.

    Raises:
        ValueError: the block is damaged.
    """
    at = 0
    try:
        while at < len(block):
            first = block[at]
            if first & 0x80:  # a field of the static table
                _, at = _read_integer(block, at, 7)
            elif first & 0xE0 == 0x20:  # the size of the dynamic table
                _, at = _read_integer(block, at, 5)
            else:
                index, at = _read_integer(block, at, 6 if first & 0x40 else 4)
                name = b""
                if index == 0:
                    name, at = _read_string(block, at)
                value, at = _read_string(block, at)
                if name:
                    yield name, value
    except IndexError:
        raise ValueError("a header block ends in the middle of a field") from None


def _integer(value: int, prefix_bits: int) -> bytes:
    most = (1 << prefix_bits) - 1
    if value < most:
        return bytes((value,))
    encoded, rest = bytearray((most,)), value - most
    while rest >= 128:
        encoded.append(rest % 128 + 128)
        rest //= 128
    encoded.append(rest)
    return bytes(encoded)


def _string(text: str) -> bytes:
    content = text.encode("ascii")
    return _integer(len(content), 7) + content


def _read_integer(block: bytes, at: int, prefix_bits: int) -> tuple[int, int]:
    """The number at `at`, and where it ends."""
    most = (1 << prefix_bits) - 1
    value = block[at] & most
    at += 1
    if value == most:
        shift = 0
        while True:
            byte = block[at]
            at += 1
            value += (byte & 127) << shift
            shift += 7
            if not byte & 128:
                break
    return value, at


def _read_string(block: bytes, at: int) -> tuple[bytes, int]:
    """The text at `at` as it stands there, and where it ends. One in Huffman's code gets a mark before it."""
    coded = block[at] & 0x80
    length, at = _read_integer(block, at, 7)
    if at + length > len(block):
        raise IndexError
    return (b"huffman:" if coded else b"") + block[at : at + length], at + length
