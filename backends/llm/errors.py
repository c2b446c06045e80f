"""Errors of the LLM engine that a user can see; each ends one request and no other."""

from __future__ import annotations

from compiler.errors import ModelkilnError


class InvalidRequest(ModelkilnError):
    """A request asks for something that is not allowed.

    Attributes:
        param: the field that is wrong, as the OpenAI API's errors name it.
    """

    exit_code = 2
    kind = "invalid_request"

    def __init__(self, message: str, *, param: str, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.param = param


class LogitsError(ModelkilnError):
    """No token can be chosen from a row of logits: it holds NaN or infinity, or no token is allowed."""

    exit_code = 1
    kind = "logits"


class GrammarError(LogitsError):
    """An answer cannot go on within its grammar: it needs more work than is allowed, or no token fits.

    Attributes:
        param: the field that is wrong, as of InvalidRequest.
    """

    param = "structured_outputs"


class RequestRefused(ModelkilnError):
    """The engine does not take a request; nothing was changed.

    Attributes:
        code: "too_long" (it never fits), "invalid", "overloaded" (try again later) or "deadline" (cannot be met).
    """

    exit_code = 1
    kind = "request_refused"

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


def prompt_too_long(num_tokens: int, max_model_len: int) -> RequestRefused:
    """Returns the refusal of a prompt that leaves no room for an answer.

    Args:
        max_model_len: tokens of a prompt and its answer together.
    """
    return RequestRefused(
        f"the prompt has {num_tokens} tokens, {max_model_len - 1} are allowed: prompt and answer together have room "
        f"for {max_model_len}",
        "too_long",
    )


def check_prompt_length(num_tokens: int, max_model_len: int) -> None:
    """Raises RequestRefused where a prompt is empty, or leaves no room for an answer."""
    if not num_tokens:
        raise RequestRefused("the prompt has no tokens, at least 1 is needed", "invalid")
    if num_tokens >= max_model_len:
        raise prompt_too_long(num_tokens, max_model_len)


def too_many_wait(num_waiting: int, limit: int, num_free: int) -> RequestRefused:
    """Returns the refusal of a request that comes when `limit` wait, beside those that find a free place."""
    places = f" beside those for {num_free} free places" if num_free else ""
    return RequestRefused(f"{num_waiting} requests wait already, {limit} are allowed{places}", "overloaded")
