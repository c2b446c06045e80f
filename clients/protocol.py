"""What can be asked of a Triton server, apart from who sends it and who waits: `Call`s, made and read. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy.typing as npt

from clients.errors import InputError
from clients.requests import InferRequest

Answer = TypeVar("Answer")
Json = dict[str, Any]
Arrays = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Call(Generic[Answer]):
    """One question to the server.

    Attributes:
        method: the name of the remote procedure over gRPC, "GET" or "POST" over HTTP.
        request: what is sent, in the protocol's own form.
        parse: makes the answer of what comes back.
        repeatable: to ask twice does no more than to ask once.
    """

    method: str
    request: Any
    parse: Callable[[Any], Answer]
    repeatable: bool = True


class Protocol(ABC):
    """How each question is put and its answer read."""

    @abstractmethod
    def server_ready(self) -> Call[bool]: ...

    @abstractmethod
    def model_ready(self, model: str, version: str) -> Call[bool]: ...

    @abstractmethod
    def server_metadata(self) -> Call[Json]: ...

    @abstractmethod
    def model_names(self) -> Call[list[str]]: ...

    @abstractmethod
    def model_metadata(self, model: str, version: str) -> Call[Json]: ...

    @abstractmethod
    def config(self, model: str, version: str) -> Call[Json]: ...

    @abstractmethod
    def statistics(self, model: str, version: str) -> Call[list[Json]]: ...

    @abstractmethod
    def infer(self, request: InferRequest) -> Call[Arrays]: ...

    @abstractmethod
    def register_region(self, name: str, key: str, byte_size: int) -> Call[None]: ...

    @abstractmethod
    def unregister_region(self, name: str) -> Call[None]: ...


def check_names(model: str, version: str) -> None:
    """Refuses what is not one part of a path: it would be another question to the server, or another file.

    Raises:
        InputError: with the name; nothing was sent.
    """
    for what, name in (("model", model), ("version", version)):
        if not isinstance(name, str):
            raise InputError(f"the {what} {name!r} is {type(name).__name__}; give it as text, such as {str(name)!r}")
        if (not name and what == "model") or name in (".", "..") or "/" in name or not name.isprintable():
            raise InputError(f"the {what} {name!r} is not allowed: a name without '/' and control characters is")
