"""The errors of perf-report. Each says what is wrong, the value seen and what is allowed."""

from __future__ import annotations


class PerfError(Exception):
    """Base of every error of this package; `exit_code` is what the command line ends with."""

    exit_code = 2


class UsageError(PerfError):
    """The question was wrong: an unknown model, an input that does not fit, a bad range."""


class ServerUnreachable(PerfError):
    """No server answers at the address."""

    exit_code = 3


class RequestFailed(PerfError):
    """One request of the load failed. Counted, never shown as a trace.

    Attributes:
        kind: short and groupable: "http 500", "grpc UNAVAILABLE", "timeout", "connection".
        message: what the server or the socket said.
    """

    exit_code = 1

    def __init__(self, kind: str, message: str = "") -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind
        self.message = message
