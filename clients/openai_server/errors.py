"""Errors as the OpenAI API has them, and what those of the clients become there."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from clients.errors import (
    ClientError,
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    ServerError,
    ServerUnavailable,
    StreamBroken,
)

log = logging.getLogger("modelkiln.openai")

_MAX_MESSAGE = 2000
_AS_THEY_ARE: Mapping[str, str] = MappingProxyType({})


class ApiError(Exception):
    """An error that the client sees.

    Attributes:
        status: of HTTP.
        type, param, code: as in the OpenAI API; `param` is the field that is wrong, where there is one.
        headers: more of the response's headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message[:_MAX_MESSAGE]
        self.type = type
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def to_json(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def body(self) -> bytes:
        return json.dumps(self.to_json()).encode()


_NOT_READY = ("is not at ready state", "Request for unknown model", "is not healthy")


def model_not_ready(name: str) -> ApiError:
    return unavailable(f"the model {name[:200]!r} is not ready; try again later")


def model_not_found(name: str, served: list[str]) -> ApiError:
    allowed = ", ".join(served) or "none"
    return ApiError(
        404, f"the model {name[:200]!r} does not exist here; allowed: {allowed}", param="model", code="model_not_found"
    )


def unavailable(message: str) -> ApiError:
    return ApiError(503, message, type="server_error", code="unavailable", headers={"retry-after": "1"})


def internal_error(reason: object) -> ApiError:
    """What the client is told of a failure that is not its own: nothing of the inside. The reason goes to the log."""
    log.error("internal error: %s", reason)
    return ApiError(500, "the server failed on this request; its log says why", type="server_error", code="internal")


def error_from_client(error: ClientError, fields: Mapping[str, str] = _AS_THEY_ARE) -> ApiError:
    """Returns the API's error for what a call to Triton ended with.

    Args:
        fields: the engine's names of fields -> the client's, where these are others.
    """
    if isinstance(error, ContextLengthExceeded):
        return ApiError(400, error.message, param=fields.get("input_ids"), code="context_length_exceeded")
    if isinstance(error, InvalidRequest):
        return ApiError(400, error.message, param=fields.get(error.param, error.param) or None)
    if isinstance(error, Overloaded):
        return ApiError(429, error.message, type="rate_limit_error", code="overloaded", headers={"retry-after": "1"})
    if isinstance(error, DeadlineExceeded):
        # That of gRPC or of the client names Triton's address; that of the engine says what can be.
        ours = error.status == "DEADLINE_EXCEEDED"
        return deadline_error("the deadline came before the answer" if ours else error.message)
    if isinstance(error, StreamBroken):
        log.warning("an answer broke off: %s", error)
        return unavailable("the model stopped in the middle of the answer; try again later")
    if isinstance(error, ServerUnavailable):
        log.warning("Triton does not answer: %s", error)
        return unavailable("the inference server does not answer; try again later")
    if isinstance(error, ServerError) and (error.status in ("UNAVAILABLE", "NOT_FOUND") or _is_not_ready(error)):
        log.warning("Triton: %s", error)
        return unavailable("the model is not ready; try again later")
    return internal_error(error)


def _is_not_ready(error: ServerError) -> bool:
    """Whether Triton says in a stream, which has no codes, that a model is being loaded or its process has died."""
    return error.status == "ERROR" and any(said in error.message for said in _NOT_READY)


def deadline_error(message: str) -> ApiError:
    # A client that tries again would only be late again.
    return ApiError(503, message, type="server_error", code="deadline_exceeded", headers={"x-should-retry": "false"})
