"""The official OpenAI clients, on a small language model with random weights behind a real tritonserver."""

from __future__ import annotations

import asyncio
import json
import re
import select
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast
from urllib.parse import urlsplit

import numpy as np
import pydantic
import pytest
from openai import AsyncOpenAI, BadRequestError, InternalServerError, OpenAI, RateLimitError, pydantic_function_tool

from backends.llm import LLMEngine, SamplingParams
from tests.clients.openai_server.conftest import MAX_NUM_SEQS, MAX_WAITING
from tests.clients.openai_server.http_calls import call
from tests.serving import Served

QUESTION: Any = [{"role": "user", "content": "Name three colours."}]
PROMPT = "The capital of France is"
WRONG = {"type": "nonsense"}  # as a JSON schema


@dataclass(frozen=True)
class Plain:
    """The engine's own answers, 24 tokens each."""

    chat: Any
    completion: Any


@pytest.fixture(scope="module")
def plain(front: Served, folder: Path) -> Plain:
    engine = LLMEngine.load(folder / "repository" / "tiny" / "1")
    try:
        ids = engine.tokenizer.chat(QUESTION)
        params = SamplingParams(max_tokens=24, logprobs=2)
        chat, completion = engine.generate([ids, PROMPT], params, progress=False)
        return Plain(chat, completion)
    finally:
        engine.close()


def chat(client: OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(
        **{"model": "tiny", "messages": QUESTION, "temperature": 0, "max_tokens": 24, **fields}
    )


def test_a_chat_is_the_engines_answer(client: OpenAI, plain: Plain) -> None:
    answer = chat(client)
    expected = plain.chat.outputs[0]
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].finish_reason == expected.finish_reason
    assert answer.usage.prompt_tokens == len(plain.chat.prompt_token_ids)
    assert answer.usage.completion_tokens == len(expected.token_ids)


def test_a_streamed_chat_is_the_same_answer(client: OpenAI, plain: Plain) -> None:
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == plain.chat.outputs[0].text
    assert chunks[-1].usage.completion_tokens == len(plain.chat.outputs[0].token_ids)
    assert len(chunks) >= 10  # it came in pieces


def test_a_second_request_finds_its_prompt_in_the_cache(client: OpenAI) -> None:
    messages = [{"role": "user", "content": "Tell me about the sea. " * 12}]
    first, second = (chat(client, messages=messages, max_tokens=1).usage for _ in range(2))
    assert first.prompt_tokens_details.cached_tokens < 32 < second.prompt_tokens_details.cached_tokens


def test_a_completion_with_log_probabilities(client: OpenAI, plain: Plain) -> None:
    answer = client.completions.create(model="tiny", prompt=PROMPT, temperature=0, max_tokens=24, logprobs=2)
    expected = plain.completion.outputs[0]
    assert answer.choices[0].text == expected.text
    found = answer.choices[0].logprobs
    assert found is not None and found.token_logprobs is not None
    assert np.allclose(found.token_logprobs, [entry.logprob for entry in expected.logprobs], atol=1e-4)
    assert found.top_logprobs is not None and all(len(top) == 2 for top in found.top_logprobs)
    assert "".join(found.tokens or ()) == expected.text


@pytest.mark.parametrize("as_tokens", [False, True])
def test_an_echoed_prompt_has_its_log_probabilities(client: OpenAI, folder: Path, as_tokens: bool) -> None:
    """What evaluations ask for that compare how likely texts are."""
    texts = ["Grüße 👩 a", "two"]
    engine = LLMEngine.load(folder / "repository" / "tiny" / "1")
    try:
        ids = [engine.tokenizer.encode(text) for text in texts]
        params = SamplingParams(max_tokens=3, logprobs=2, prompt_logprobs=2)
        expected = engine.generate(ids, params, progress=False)
    finally:
        engine.close()
    prompt: Any = ids if as_tokens else texts
    wanted: Any = {"model": "tiny", "prompt": prompt, "max_tokens": 3, "echo": True, "logprobs": 2, "temperature": 0}
    for _ in range(2):  # the second time most of the prompt is cached
        choices = client.completions.create(**wanted, n=2).choices
        for place, choice in enumerate(choices):
            text, result, logprobs = texts[place // 2], expected[place // 2], cast(Any, choice.logprobs)
            entries = [*result.prompt_logprobs, *result.outputs[0].logprobs]
            assert choice.text == text + result.outputs[0].text
            assert logprobs.tokens[0] == "<bos>" and logprobs.token_logprobs[0] is logprobs.top_logprobs[0] is None
            assert logprobs.token_logprobs[1:] == pytest.approx([entry.logprob for entry in entries], abs=1e-4)
            assert all(2 <= len(top) <= 3 for top in logprobs.top_logprobs[1:])
            # The tokens are bytes: those of a character stand where it does, or behind it.
            offsets, end = logprobs.text_offset, len(text)
            assert len(offsets) == len(logprobs.tokens) == 1 + len(text.encode()) + 3
            assert offsets[0] == 0 and offsets[-3:] == [end, end + 1, end + 2]
            ascii_at = [n + 1 for n, byte in enumerate(text.encode()) if byte < 0x80]
            assert [text[offsets[n]] for n in ascii_at] == [logprobs.tokens[n] for n in ascii_at]


def test_an_echo_without_an_answer_scores_a_text(client: OpenAI) -> None:
    """`max_tokens` 0, as evaluations ask for it: the same prompt, and nothing behind it."""
    wanted: Any = {"model": "tiny", "prompt": PROMPT, "echo": True, "logprobs": 1, "temperature": 0}
    one, none = (client.completions.create(**wanted, max_tokens=count) for count in (1, 0))
    (full,), (choice,) = one.choices, none.choices
    assert choice.text == PROMPT and choice.finish_reason == "length"
    assert cast(Any, choice.logprobs).tokens == cast(Any, full.logprobs).tokens[:-1]
    assert cast(Any, choice.logprobs).token_logprobs == cast(Any, full.logprobs).token_logprobs[:-1]
    assert none.usage is not None and one.usage is not None
    assert (none.usage.completion_tokens, none.usage.prompt_tokens) == (0, one.usage.prompt_tokens)


@pytest.mark.parametrize("fields", [{}, {"echo": True, "stream": True}])
def test_no_tokens_are_asked_for_with_an_echo_alone(front: Served, fields: dict[str, Any]) -> None:
    refused = call(front, "POST", "/v1/completions", {"model": "tiny", "prompt": "a", "max_tokens": 0, **fields})
    assert refused.status == 400 and refused.error["param"] == "max_tokens"


def test_chat_log_probabilities_have_the_bytes_of_the_text(client: OpenAI) -> None:
    answer = chat(client, logprobs=True, top_logprobs=3, messages=[{"role": "user", "content": "Say: é 你好"}])
    tokens = answer.choices[0].logprobs.content
    data = b"".join(bytes(token.bytes) for token in tokens)
    assert data.decode(errors="replace").startswith(answer.choices[0].message.content)
    assert all(len(token.top_logprobs) == 3 and token.top_logprobs[0].logprob >= token.logprob for token in tokens)


def test_twelve_streams_at_once_by_the_async_client(front: Served, plain: Plain) -> None:
    async def run() -> list[str]:
        async with AsyncOpenAI(base_url=front.openai, api_key="none", max_retries=0, timeout=120) as client:

            async def one() -> str:
                stream = await client.chat.completions.create(
                    model="tiny", messages=QUESTION, temperature=0, max_tokens=24, stream=True
                )
                return "".join([c.choices[0].delta.content or "" async for c in stream])

            return await asyncio.gather(*(one() for _ in range(MAX_WAITING)))

    assert set(asyncio.run(run())) == {plain.chat.outputs[0].text}


def test_n_answers_and_seeds(client: OpenAI) -> None:
    first, second = (chat(client, temperature=1.0, seed=7, n=3) for _ in range(2))
    texts = [c.message.content for c in first.choices]
    assert len(set(texts)) > 1 and texts == [c.message.content for c in second.choices]
    streamed: dict[int, str] = {}
    for chunk in chat(client, temperature=1.0, seed=7, n=3, stream=True):
        choice = chunk.choices[0]
        streamed[choice.index] = streamed.get(choice.index, "") + (choice.delta.content or "")
    assert [streamed[i] for i in range(3)] == texts


def test_stop_strings_bias_and_lengths(client: OpenAI, plain: Plain) -> None:
    text = plain.chat.outputs[0].text
    word = text[10:13]
    stopped = chat(client, stop=[word]).choices[0]
    assert (stopped.message.content, stopped.finish_reason) == (text.split(word)[0], "stop")
    first = plain.chat.outputs[0].token_ids[0]
    assert chat(client, max_tokens=1, logit_bias={str(first): -100}).choices[0].message.content != text[:3]
    assert chat(client, max_completion_tokens=2, max_tokens=9).usage.completion_tokens == 2


SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}, "count": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["colour", "count"],
    "additionalProperties": False,
}


def _is_of_schema(value: Any) -> bool:
    return set(value) == {"colour", "count"} and value["colour"] in ("red", "green") and 1 <= value["count"] <= 9


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_follows_the_schema_of_its_response_format(client: OpenAI, stream: bool) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "pick", "schema": SCHEMA, "strict": True}}
    answer = chat(client, response_format=form, max_tokens=200, temperature=1, seed=1, stream=stream)
    if stream:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in answer)
    else:
        text = answer.choices[0].message.content
    assert _is_of_schema(json.loads(text))


def test_the_parsing_helper_of_the_client_works(client: OpenAI) -> None:
    class Pick(pydantic.BaseModel):
        colour: Literal["red", "green"]
        sure: bool

    parsed = client.chat.completions.parse(
        model="tiny", messages=QUESTION, response_format=Pick, temperature=0, max_tokens=200
    )
    assert isinstance(parsed.choices[0].message.parsed, Pick)


def test_a_forced_tool_is_called_with_arguments_of_its_schema(client: OpenAI) -> None:
    tools = [{"type": "function", "function": {"name": "pick", "parameters": SCHEMA}}]
    named = {"type": "function", "function": {"name": "pick"}}
    for choice, reason in ((named, "stop"), ("required", "tool_calls")):
        answer = chat(client, tools=tools, tool_choice=choice, max_tokens=200, temperature=1, seed=2).choices[0]
        (call,) = answer.message.tool_calls
        assert call.function.name == "pick" and _is_of_schema(json.loads(call.function.arguments))
        assert (answer.finish_reason, answer.message.content) == (reason, None)
        chunks = list(chat(client, tools=tools, tool_choice=choice, max_tokens=200, temperature=1, seed=2, stream=True))
        deltas = [delta for chunk in chunks for delta in chunk.choices[0].delta.tool_calls or ()]
        assert "".join(delta.function.arguments for delta in deltas) == call.function.arguments
        assert [delta.function.name for delta in deltas if delta.function.name] == ["pick"]
        assert chunks[-1].choices[0].finish_reason == reason


class Shade(pydantic.BaseModel):
    colour: Literal["red", "blue"]


class Mix(pydantic.BaseModel):
    first: Shade
    second: Shade


def test_tools_of_nested_pydantic_models_are_called(client: OpenAI) -> None:
    """Their schemas refer to `#/$defs/Shade`, each from its own root."""
    tools = [pydantic_function_tool(Shade), pydantic_function_tool(Mix)]
    for seed in range(8):
        answer = client.chat.completions.parse(
            model="tiny", messages=QUESTION, tools=tools, tool_choice="required", max_tokens=400, seed=seed
        )
        (call,) = answer.choices[0].message.tool_calls or ()
        if isinstance(call.function.parsed_arguments, Mix):
            return
        assert isinstance(call.function.parsed_arguments, Shade)
    raise AssertionError("eight answers, and none of them calls Mix")


def test_other_forms_of_answers(client: OpenAI) -> None:
    def text(**fields: Any) -> str:
        return str(chat(client, temperature=1, seed=3, max_tokens=200, **fields).choices[0].message.content)

    assert text(extra_body={"structured_outputs": {"choice": ["yes", "no"]}}) in ("yes", "no")
    assert re.fullmatch("[a-c]{3}-[0-9]{2}", text(extra_body={"structured_outputs": {"regex": "[a-c]{3}-[0-9]{2}"}}))
    with pytest.raises(BadRequestError) as wrong:
        text(extra_body={"structured_outputs": {"regex": "("}})
    assert wrong.value.param == "structured_outputs"


def test_errors_are_the_clients_own_classes(client: OpenAI) -> None:
    with pytest.raises(BadRequestError) as too_long:
        client.completions.create(model="tiny", prompt=[5] * 20_000)
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(BadRequestError) as wrong_token:
        client.completions.create(model="tiny", prompt="x", logit_bias={"99999999": 1})
    assert wrong_token.value.param == "logit_bias"
    with pytest.raises(InternalServerError) as late:
        chat(client, max_tokens=500, extra_body={"deadline_ms": 1, "ignore_eos": True})
    assert late.value.code == "deadline_exceeded" and late.value.status_code == 503
    assert client.models.retrieve("tiny").id == "tiny"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": WRONG}}},
            "response_format",
        ),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": WRONG}}]}, "tools"),
        ({"extra_body": {"structured_outputs": {"json": WRONG}}}, "structured_outputs"),
        ({"messages": [{"role": "user", "content": "x" * 9000}]}, "messages"),
    ],
)
def test_errors_name_the_field_that_was_sent(client: OpenAI, fields: dict[str, Any], param: str) -> None:
    if param == "tools":
        fields = {**fields, "tool_choice": "required"}
    with pytest.raises(BadRequestError) as wrong:
        chat(client, **fields)
    assert wrong.value.param == param


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_with_more_prompts_than_the_queue_holds_is_answered(client: OpenAI, stream: bool) -> None:
    """It waits for its own prompts: refused for them it would be each time that it is sent."""
    prompts, n = [PROMPT] * (2 * (MAX_NUM_SEQS + MAX_WAITING)), 2
    wanted: Any = {"model": "tiny", "prompt": prompts, "max_tokens": 100, "n": n, "temperature": 0, "stream": stream}
    answer = client.completions.create(**wanted, extra_body={"ignore_eos": True})
    choices = [choice for chunk in answer for choice in chunk.choices] if stream else answer.choices
    ended = sorted(choice.index for choice in choices if choice.finish_reason == "length")
    assert ended == list(range(n * len(prompts)))
    assert len({"".join(c.text for c in choices if c.index == index) for index in ended}) == 1


def test_a_full_queue_is_a_rate_limit(front: Served, client: OpenAI) -> None:
    """Answers of thousands of tokens have all places and the whole queue, until their clients go."""
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 8000, "ignore_eos": True}
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}"
    where = urlsplit(front.openai)
    connections = [socket.create_connection((where.hostname, where.port)) for _ in range(MAX_WAITING + MAX_NUM_SEQS)]
    for connection in connections:
        connection.sendall(head.encode() + b"\r\n\r\n" + data)
    _wait_for(lambda: _metric(front, "vllm:num_requests_waiting") == MAX_WAITING)
    once = client.with_options(max_retries=0)
    with pytest.raises(RateLimitError, match=str(MAX_WAITING)) as refused:
        once.completions.create(model="tiny", prompt=PROMPT, max_tokens=1)
    assert refused.value.code == "overloaded"
    for connection in connections:
        connection.close()
    _wait_for(lambda: _is_answered(client))


@pytest.mark.parametrize("stream", [True, False])
def test_f09_a_client_that_leaves_ends_its_generation(front: Served, client: OpenAI, stream: bool) -> None:
    """Answers of thousands of tokens fill the engine and its queue, and would for a minute; then their clients go."""
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 8000, "ignore_eos": True, "stream": stream}
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}"
    where = urlsplit(front.openai)
    connections = [socket.create_connection((where.hostname, where.port)) for _ in range(2 * MAX_WAITING)]
    for connection in connections:
        connection.sendall(head.encode() + b"\r\n\r\n" + data)
    _wait_for_statuses(connections, 429, 2 * MAX_WAITING - MAX_NUM_SEQS - MAX_WAITING)  # those without room
    for connection in connections:
        connection.close()
    _wait_for(lambda: _is_answered(client))
    _wait_for(lambda: _metric(front, "vllm:num_requests_running") + _metric(front, "vllm:num_requests_waiting") == 0)
    _wait_for(lambda: _metric(front, "vllm:kv_cache_usage_perc") == 0)  # every block is free again


def _metric(front: Served, name: str) -> float:
    """The value of a metric of the engine, as the front end passes it on from Triton."""
    text = call(front, "GET", "/metrics").body.decode()
    (value,) = re.findall(rf"^{re.escape(name)}\{{[^}}]*\}} (\S+)$", text, re.M)
    return float(value)


def _wait_for_statuses(connections: list[socket.socket], status: int, count: int) -> None:
    open_ones = set(connections)
    while count > 0:
        readable, _, _ = select.select(open_ones, [], [], 20)
        assert readable
        for connection in readable:
            count -= int(connection.recv(12).split()[1]) == status
            open_ones.remove(connection)


def _is_answered(client: OpenAI) -> bool:
    try:
        chat(client, max_tokens=1)
    except RateLimitError:
        return False
    return True


def _wait_for(condition: Any, limit_s: float = 20) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
