"""Every error a client raises. A caller who catches `ClientError` catches them all."""

from __future__ import annotations

import re


class ClientError(Exception):
    """Base of every error of the clients."""


class InputError(ClientError):
    """The request does not fit the model; nothing was sent."""


class MissingDependency(ClientError):
    """A package that this client needs is not installed."""


class SharedMemoryError(ClientError):
    """A region of shared memory cannot be made, or the server cannot reach it."""


class ServerError(ClientError):
    """The server was reached and refused or failed the request.

    Attributes:
        status: the protocol's own word: "404" over HTTP, "NOT_FOUND" over gRPC, "ERROR" in a stream, which has none.
        message: what the server said.
    """

    def __init__(self, status: str, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.message = message


class InvalidRequest(ServerError):
    """A language model refused a parameter; `param` is its name, "" where it is none in particular."""

    def __init__(self, status: str, message: str, param: str = "") -> None:
        super().__init__(status, message)
        self.param = param


class ContextLengthExceeded(InvalidRequest):
    """Prompt and answer do not fit the language model's context."""


class Overloaded(ServerError):
    """The queue is full: nothing was begun, and the same request may be sent again in `retry_after_s` seconds."""

    retry_after_s = 1.0


class DeadlineExceeded(ServerError):
    """No answer within the time limit, or the server foresees that there can be none."""


class EngineFailed(ServerError):
    """The language model's engine failed; its other requests fail, too, and it is not ready any more."""


class ServerUnavailable(ClientError):
    """No server answers at the address.

    Attributes:
        sent: the server may have begun the request. False means that it never got it.
    """

    def __init__(self, address: str, reason: str = "", *, sent: bool = False) -> None:
        super().__init__(self._text(address, f": {reason}" if reason else ""))
        self.address = address
        self.sent = sent

    def _text(self, address: str, because: str) -> str:
        return f"no Triton server answers at {address}{because}. Is it running? `compile serve` starts one"


class ClientClosed(ServerUnavailable):
    """The client was closed, before the call or during it."""

    def _text(self, address: str, because: str) -> str:
        return f"this client of {address} is closed{because}; make a new one"


class StreamBroken(ServerUnavailable):
    """The connection, the server or the model's process ended in the middle of an answer."""

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(address, reason, sent=True)

    def _text(self, address: str, because: str) -> str:
        return f"the answer from {address} broke off{because}. What came so far is not the whole answer"


# A language model says the kind in the text, since a gRPC stream carries no code (docs/serving_llm.md).
_KIND = re.compile(r"^\[([a-z_]+)(?::([^\]]*))?\] ?")


def server_error(status: str, message: str) -> ServerError:
    """The error that a server's words stand for: `[kind:param]` in front of them says which, else the status."""
    found = _KIND.match(message)
    kind, param = (found[1], found[2] or "") if found else ("", "")
    text = message[found.end() :] if found else message
    if kind == "invalid_request":
        return InvalidRequest(status, text, param)
    if kind == "context_length_exceeded":
        return ContextLengthExceeded(status, text, param)
    if kind in _KINDS:
        return _KINDS[kind](status, text)
    if status == "DEADLINE_EXCEEDED":
        return DeadlineExceeded(status, message)
    return ServerError(status, message)


_KINDS: dict[str, type[ServerError]] = {
    "overloaded": Overloaded,
    "deadline": DeadlineExceeded,
    "internal": EngineFailed,
}
