"""What every client has, whoever waits and over whichever protocol: address, limits, what it remembers of models."""

from __future__ import annotations

from clients.errors import InputError
from clients.generation import GenerateOptions
from clients.retries import Attempts, RetryBudget, RetryPolicy
from clients.types import ModelMetadata

# An answer of a language model takes as long as it is; this is so that nothing can hang for ever.
GENERATE_TIMEOUT_S = 600.0
# So much later than the server, whose last words are worth more than our own error.
DEADLINE_GRACE_S = 1.0


class ClientCore:
    """The state that all clients share; for the arguments see `clients.base.TritonClient`."""

    def __init__(self, url: str, timeout_s: float = 60.0, retries: RetryPolicy | None = None) -> None:
        self.url = _address(url)
        self.timeout_s = timeout_s
        self.retries = retries or RetryPolicy()
        self._budget = RetryBudget()
        self._metadata: dict[tuple[str, str], ModelMetadata] = {}
        self._closed = False

    def _attempts(self, timeout_s: float | None, retries: RetryPolicy | None, *, repeatable: bool) -> Attempts:
        limit = self.timeout_s if timeout_s is None else timeout_s
        return Attempts(retries or self.retries, self._budget, limit, repeatable=repeatable)

    def _attempts_to_generate(self, options: GenerateOptions) -> Attempts:
        """For an answer of a language model; our own limit comes after the server's."""
        limit = GENERATE_TIMEOUT_S if options.timeout_s is None else options.timeout_s + DEADLINE_GRACE_S
        return self._attempts(limit, None, repeatable=False)


def _address(url: str) -> str:
    scheme, found, rest = url.rpartition("://")
    if found and scheme not in ("http", "grpc"):
        raise InputError(f"the address {url!r} has the scheme {scheme!r}; allowed: none, 'http' or 'grpc' (no TLS)")
    return rest.rstrip("/")
