"""Errors as the OpenAI API has them, and what Triton's and the engine's become there."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from typing import Any

log = logging.getLogger("modelkiln.openai")

# How the backend begins an error's text (docs/serving_llm.md).
_KIND = re.compile(r"^\[(\w+)(?::([^\]\s]{1,100}))?\] (.*)", re.DOTALL)
_MAX_MESSAGE = 2000


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


def error_from_engine(text: str) -> ApiError:
    """Returns the API's error for an error text that came from Triton or the engine behind it."""
    match = _KIND.match(text)
    if match is None:
        return _error_from_triton(text)
    kind, param, message = match.groups()
    if kind == "invalid_request":
        return ApiError(400, message, param=param)
    if kind == "context_length_exceeded":
        return ApiError(400, message, param=param, code="context_length_exceeded")
    if kind == "overloaded":
        return ApiError(429, message, type="rate_limit_error", code="overloaded", headers={"retry-after": "1"})
    if kind == "deadline":
        return deadline_error(message)
    return internal_error(text)


def deadline_error(message: str) -> ApiError:
    # A client that tries again would only be late again.
    return ApiError(503, message, type="server_error", code="deadline_exceeded", headers={"x-should-retry": "false"})


def _error_from_triton(text: str) -> ApiError:
    if "unknown model" in text or "not ready" in text or "is not available" in text:
        log.warning("Triton: %s", text)
        return unavailable("the model is not ready; try again later")
    return internal_error(text)


def error_from_rpc(code: str, details: str) -> ApiError:
    """Returns the API's error for a call that failed.

    Args:
        code: gRPC's name of it: "UNAVAILABLE".
        details: what came with it.
    """
    if _KIND.match(details):
        return error_from_engine(details)
    if code == "UNAVAILABLE":
        log.warning("Triton does not answer: %s", details)
        return unavailable("the inference server does not answer; try again later")
    if code == "DEADLINE_EXCEEDED":
        return deadline_error("the answer was not there in the time that a request may take")
    if code == "INVALID_ARGUMENT" and "unexpected" not in details:
        log.warning("Triton refused a request: %s", details)
    return _error_from_triton(f"{code}: {details}")
