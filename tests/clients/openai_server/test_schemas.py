"""Bodies with very many faults: they are refused for the first, and cost no more than to be read."""

from __future__ import annotations

from typing import Any

import pydantic
import pytest

from clients.openai_server.body import parse_body
from clients.openai_server.errors import ApiError
from clients.openai_server.schemas import (
    MAX_BIASES,
    MAX_MESSAGES,
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    Request,
)
from clients.openai_server.settings import Limits

MANY = 50_000
USER: dict[str, Any] = {"role": "user", "content": "x"}
CASES: list[tuple[type[Request], dict[str, Any], str]] = [
    (CompletionRequest, {"prompt": ["x"] * MANY}, "prompt.0"),
    (CompletionRequest, {"prompt": [1.5] * MANY}, "prompt.0"),
    (CompletionRequest, {"prompt": [*["x"] * 100, *[1] * MANY]}, "prompt.100"),
    (CompletionRequest, {"prompt": [[]] * MANY}, "prompt.0"),
    (CompletionRequest, {"prompt": [["x"] * MANY]}, "prompt.0.0"),
    (CompletionRequest, {"prompt": "x", "stop": [1] * MANY}, "stop.0"),
    (CompletionRequest, {"prompt": "x", "stop_token_ids": [-1] * MANY}, "stop_token_ids.0"),
    (ChatRequest, {"messages": [{}] * MANY}, "messages.0.role"),
    (ChatRequest, {"messages": [USER] * MANY}, "messages"),
    (ChatRequest, {"messages": [{**USER, "content": [1] * MANY}]}, "messages.0.content.0"),
    (ChatRequest, {"messages": [{**USER, "content": [{"type": "text", "text": ""}] * MANY}]}, "messages.0.content"),
    (ChatRequest, {"messages": [{"role": "assistant", "tool_calls": [{}] * MANY}]}, "messages.0.tool_calls.0.id"),
    (ChatRequest, {"messages": [USER], "tools": [{}] * MANY}, "tools.0.type"),
    (ChatRequest, {"messages": [USER], "logit_bias": {f"x{i}": 1 for i in range(MANY)}}, "logit_bias"),
    (EmbeddingRequest, {"input": [1] * MANY}, "input.0"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "fields", "param"), CASES, ids=[case[2] for case in CASES])
def test_a_body_is_refused_for_its_first_fault(model: type[Request], fields: dict[str, Any], param: str) -> None:
    body = {"model": "x", **fields}
    with pytest.raises(pydantic.ValidationError) as found:
        model.model_validate(body)
    assert found.value.error_count() <= 6  # one for each form that is allowed
    with pytest.raises(ApiError) as refused:
        parse_body(_json(body), model, Limits())
    assert refused.value.status == 400 and refused.value.param == param
    assert len(refused.value.message) < 300


def _json(body: dict[str, Any]) -> bytes:
    return pydantic.RootModel[Any](body).model_dump_json().encode()


def test_the_message_is_of_the_form_that_was_meant() -> None:
    for prompt, words in (([], "at least 1 item"), (5, "valid string")):
        with pytest.raises(ApiError) as refused:
            parse_body(_json({"model": "x", "prompt": prompt}), CompletionRequest, Limits())
        assert words in refused.value.message


def test_what_is_allowed_is_taken() -> None:
    biases = {str(i): 1 for i in range(MAX_BIASES)}
    chat = ChatRequest.model_validate({"model": "x", "messages": [USER] * MAX_MESSAGES, "logit_bias": biases})
    assert len(chat.messages) == MAX_MESSAGES and chat.logit_bias == biases
    assert len(CompletionRequest.model_validate({"model": "x", "prompt": [1] * MANY}).prompt) == MANY
