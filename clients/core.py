"""What every client has, whoever waits and over whichever protocol: address, limits, what it remembers of models."""

from __future__ import annotations

import math
import re
from numbers import Real

from clients.errors import DeadlineExceeded, InputError
from clients.generation import GenerateOptions
from clients.retries import Attempts, RetryBudget, RetryPolicy
from clients.types import ModelMetadata

# An answer of a language model takes as long as it is; this is so that nothing can hang for ever.
GENERATE_TIMEOUT_S = 600.0
# So much later than the server, whose last words are worth more than our own error.
DEADLINE_GRACE_S = 1.0
# A year: sockets and Triton overflow far beyond it.
LONGEST_TIMEOUT_S = 31_536_000.0
_HOST_AND_PORT = re.compile(r"(\[[0-9A-Za-z:.%]+\]|[^\s:/?#@\[\]]+):([0-9]{1,5})")


class ClientCore:
    """The state that all clients share; for the arguments see `clients.base.TritonClient`."""

    def __init__(self, url: str, timeout_s: float = 60.0, retries: RetryPolicy | None = None) -> None:
        self.url = address_from_url(url)
        self.timeout_s = _checked_timeout(timeout_s)
        if not self.timeout_s > 0:
            raise InputError(f"a client's timeout_s of {timeout_s!r} is not allowed; give seconds, more than 0")
        self.retries = retries or RetryPolicy()
        self._budget = RetryBudget()
        self._metadata: dict[tuple[str, str], ModelMetadata] = {}
        self._closed = False

    def _attempts(self, timeout_s: float | None, retries: RetryPolicy | None, *, repeatable: bool) -> Attempts:
        return Attempts(retries or self.retries, self._budget, self._limit_s(timeout_s), repeatable=repeatable)

    def _limit_s(self, timeout_s: float | None) -> float:
        """The time limit of a call in seconds.

        Raises:
            InputError: `timeout_s` is no time.
            DeadlineExceeded: it is over, as of a caller whose own deadline has passed; nothing was sent.
        """
        limit = self.timeout_s if timeout_s is None else _checked_timeout(timeout_s)
        if not limit > 0:
            message = f"nothing was sent to {self.url}: a time limit of {limit:g} s is over"
            raise DeadlineExceeded("DEADLINE_EXCEEDED", message)
        return limit

    def _attempts_to_generate(self, options: GenerateOptions) -> Attempts:
        """For an answer of a language model; our own limit comes after the server's."""
        limit = GENERATE_TIMEOUT_S if options.timeout_s is None else self._limit_s(options.timeout_s) + DEADLINE_GRACE_S
        return self._attempts(limit, None, repeatable=False)


def address_from_url(url: str) -> str:
    """`host:port` of what a user writes: with http:// or grpc:// in front, with a slash at the end.

    Raises:
        InputError: it is neither.
    """
    scheme, found, rest = url.rpartition("://")
    if found and scheme.lower() not in ("http", "grpc"):
        raise InputError(f"the address {url!r} has the scheme {scheme!r}; allowed: none, 'http' or 'grpc' (no TLS)")
    address = rest.rstrip("/")
    matched = _HOST_AND_PORT.fullmatch(address)
    if matched is None or not 1 <= int(matched[2]) <= 65535:
        raise InputError(f"the address {url!r} is not allowed; allowed: host:port, as in 127.0.0.1:8001 or [::1]:8001")
    return address


def _checked_timeout(timeout_s: float) -> float:
    if not isinstance(timeout_s, Real) or math.isnan(timeout_s) or timeout_s > LONGEST_TIMEOUT_S:
        allowed = f"seconds, up to {LONGEST_TIMEOUT_S:,.0f} (a year)"
        raise InputError(f"a time limit of {timeout_s!r} is not allowed; give {allowed}")
    return timeout_s
