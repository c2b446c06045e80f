"""Every error a client raises. A caller who catches `ClientError` catches them all."""

from __future__ import annotations


class ClientError(Exception):
    """Base of every error of the clients."""


class InputError(ClientError):
    """The request does not fit the model; nothing was sent."""


class MissingDependency(ClientError):
    """A package that this client needs is not installed."""


class ServerError(ClientError):
    """The server was reached and refused or failed the request.

    Attributes:
        status: the protocol's own word: "404" over HTTP, "NOT_FOUND" over gRPC.
        message: what the server said.
    """

    def __init__(self, status: str, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status
        self.message = message


class ServerUnavailable(ClientError):
    """No server answers at the address."""

    def __init__(self, address: str, reason: str = "") -> None:
        because = f": {reason}" if reason else ""
        hint = "Is it running? `compile serve` starts one"
        super().__init__(f"no Triton server answers at {address}{because}. {hint}")
        self.address = address
