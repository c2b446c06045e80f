"""What every client has, whoever waits and over whichever protocol: address, limits, what it remembers of models."""

from __future__ import annotations

from clients.errors import InputError
from clients.types import ModelMetadata

# An answer of a language model takes as long as it is; this is so that nothing can hang for ever.
GENERATE_TIMEOUT_S = 600.0
# So much later than the server, whose last words are worth more than our own error.
DEADLINE_GRACE_S = 1.0


class ClientCore:
    """The state that all clients share.

    Args:
        url: `host:port`; `http://` or `grpc://` in front is dropped.
        timeout_s: seconds that one call may take, connecting and trying again included.
    """

    def __init__(self, url: str, timeout_s: float = 60.0) -> None:
        self.url = _address(url)
        self.timeout_s = timeout_s
        self._metadata: dict[tuple[str, str], ModelMetadata] = {}
        self._closed = False


def _address(url: str) -> str:
    scheme, found, rest = url.rpartition("://")
    if found and scheme not in ("http", "grpc"):
        raise InputError(f"the address {url!r} has the scheme {scheme!r}; allowed: none, 'http' or 'grpc' (no TLS)")
    return rest.rstrip("/")


def generate_limit_s(timeout_s: float | None) -> float:
    """Seconds after which the client gives up on an answer for which the server has `timeout_s`."""
    return GENERATE_TIMEOUT_S if timeout_s is None else timeout_s + DEADLINE_GRACE_S
