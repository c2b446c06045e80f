"""What a request is told when it cannot be answered: a kind that clients go by, and what the kind is to Triton."""

from __future__ import annotations

from dataclasses import dataclass

from backends.llm.errors import InvalidRequest, RequestRefused
from compiler.errors import ModelkilnError

# Kind -> the name of Triton's status code; a gRPC stream carries no code, so the text begins with the kind.
CODES = {
    "invalid_request": "INVALID_ARG",
    "context_length_exceeded": "INVALID_ARG",
    "overloaded": "UNAVAILABLE",
    "deadline": "CANCELLED",
    "cancelled": "CANCELLED",
    "internal": "INTERNAL",
}
_KIND_OF_REFUSAL = {"too_long": "context_length_exceeded", "overloaded": "overloaded", "deadline": "deadline"}


@dataclass(frozen=True)
class ResponseError:
    """An error response.

    Attributes:
        kind: a key of CODES.
        message: one line.
        field: the input or the sampling parameter that is wrong, or an empty string.
    """

    kind: str
    message: str
    field: str = ""

    @property
    def code(self) -> str:
        return CODES[self.kind]

    def __str__(self) -> str:
        return f"[{self.kind}{':' * bool(self.field)}{self.field}] {self.message}"


CANCELLED = ResponseError("cancelled", "the request was cancelled by its cancel_id")
UNLOADING = ResponseError("overloaded", "the model is being unloaded")


def response_error(error: Exception, prompt_input: str = "") -> ResponseError:
    """Returns what a client is told of an error; of one that nobody foresaw its type only: its text may hold paths.

    Args:
        prompt_input: what the engine calls `prompt` is called so by the client.
    """
    if isinstance(error, InvalidRequest):
        field = prompt_input if error.param == "prompt" else error.param
        return ResponseError("invalid_request", _one_line(error), field)
    if isinstance(error, RequestRefused):
        return ResponseError(_KIND_OF_REFUSAL.get(error.code, "invalid_request"), _one_line(error))
    if isinstance(error, ModelkilnError):
        return ResponseError("internal", _one_line(error))
    return ResponseError("internal", f"the request failed with {type(error).__name__}; the server's log says more")


def _one_line(error: ModelkilnError) -> str:
    text = f"{error.message} ({error.hint})" if error.hint else error.message
    return " ".join(text.split())
