"""How the front end is set up, and what it takes from a client at most."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Limits:
    """What one client may do; they protect the Triton behind, which has no such limits.

    Attributes:
        head_bytes: of a request's line and headers.
        head_s: until they are complete, from the first byte or the connection on.
        body_bytes: of one body.
        all_bodies_bytes: of all bodies that are being read at once.
        body_s: until a body is complete.
        chunks: of a chunked body.
        json_depth, json_values: how deep a body is nested; how many commas, brackets and braces it has.
        write_stall_s: how long a client may leave what was sent to it unread.
        request_s: until an answer is complete.
    """

    head_bytes: int = 8 << 10
    head_s: float = 10.0
    body_bytes: int = 64 << 20
    all_bodies_bytes: int = 512 << 20
    body_s: float = 60.0
    chunks: int = 65_536
    json_depth: int = 100
    json_values: int = 1_000_000
    write_stall_s: float = 30.0
    request_s: float = 600.0


@dataclass(frozen=True)
class Settings:
    """What to serve and where.

    Attributes:
        triton: `host:port` of Triton's gRPC.
        repository: the model repository that Triton serves; tokenizers and chat templates are read from it.
        host, port: to listen on; port 0 takes a free one.
        triton_metrics: the URL of Triton's metrics, passed on by /metrics; empty leaves them out.
        api_key: what clients must send as `Authorization: Bearer`; empty lets everyone in.
    """

    triton: str
    repository: Path
    host: str = "127.0.0.1"
    port: int = 9000
    triton_metrics: str = ""
    api_key: str = field(default="", repr=False)
    limits: Limits = Limits()
