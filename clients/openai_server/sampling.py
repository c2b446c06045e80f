"""A request's fields as the engine's sampling parameters. Pure."""

from __future__ import annotations

from typing import Any

from clients.openai_server.errors import ApiError
from clients.openai_server.schemas import ChatRequest, CompletionRequest, NamedTool, Sampling
from clients.openai_server.tool_schemas import required_schema

# Taken over by name where they are given.
_SAME = (
    "n",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop",
    "logit_bias",
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "structured_outputs",
)

# The engine's names of fields that a client has not written -> what it wrote instead.
COMPLETION_FIELDS = {"input_ids": "prompt"}


def chat_fields(request: ChatRequest) -> dict[str, str]:
    """Returns the same for a chat."""
    fields = {"input_ids": "messages"}
    if not request.structured_outputs:
        forced = request.tool_choice == "required" or isinstance(request.tool_choice, NamedTool)
        fields["structured_outputs"] = "tools" if forced else "response_format"
    return fields


def chat_sampling(request: ChatRequest) -> dict[str, Any]:
    """Returns the parameters of a chat; by default the answer may be as long as the context has room for."""
    found = _sampling(request, request.max_completion_tokens or request.max_tokens or 2**31 - 1)
    if request.top_logprobs is not None and not request.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    if request.logprobs:
        found["logprobs"] = request.top_logprobs or 0
    structured = _structured(request)
    if structured and request.structured_outputs:
        raise ApiError(
            400, "structured_outputs goes with neither response_format nor a forced tool", param="structured_outputs"
        )
    if structured:
        found["structured_outputs"] = structured
    return found


def completion_sampling(request: CompletionRequest) -> dict[str, Any]:
    """Returns the parameters of a completion."""
    if request.echo and request.logprobs is not None and request.stream:
        raise ApiError(400, "echo goes with logprobs or with a stream: those of a prompt come last", param="echo")
    if request.max_tokens == 0 and (request.stream or not request.echo):
        message = "max_tokens is 0; allowed: 1 and more, and 0 with echo and without stream"
        raise ApiError(400, message, param="max_tokens")
    # The engine answers with one token at least; where none is wanted it is left out of the response.
    found = _sampling(request, 16 if request.max_tokens is None else max(request.max_tokens, 1))
    if request.logprobs is not None:
        found["logprobs"] = request.logprobs
        if request.echo:
            found["prompt_logprobs"] = request.logprobs
    return found


def _sampling(request: Sampling, max_tokens: int) -> dict[str, Any]:
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "stream_options needs stream: true", param="stream_options")
    found = {name: value for name in _SAME if (value := getattr(request, name)) is not None}
    # The API's defaults; the engine's own is greedy.
    found["temperature"] = 1.0 if request.temperature is None else request.temperature
    found["top_p"] = 1.0 if request.top_p is None else request.top_p
    found["max_tokens"] = max_tokens
    return found


def _structured(request: ChatRequest) -> dict[str, Any] | None:
    """Returns what the answer's form must be, from the tool that is forced or the response format."""
    functions = {tool.function.name: tool.function.parameters for tool in request.tools or ()}
    choice = request.tool_choice
    if isinstance(choice, NamedTool):
        if choice.function.name not in functions:
            allowed = ", ".join(functions) or "none: there are no tools"
            raise ApiError(400, f"tool_choice names {choice.function.name!r}; allowed: {allowed}", param="tool_choice")
        return {"json": functions[choice.function.name] or {"type": "object"}}
    if choice == "required":
        if not functions:
            raise ApiError(400, "tool_choice is 'required' and there are no tools", param="tool_choice")
        return {"json": required_schema(list(functions.items()))}
    form = request.response_format
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return {"json_object": True}
    if form.json_schema.schema_ is None:
        raise ApiError(400, "response_format.json_schema.schema is missing", param="response_format.json_schema.schema")
    return {"json": form.json_schema.schema_}
