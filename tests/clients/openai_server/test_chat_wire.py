"""Chat completions on the wire, as client libraries need them; the model behind says what the test tells it to."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from backends.llm.tokenizers import load_tokenizer
from tests.clients.openai_server.http_calls import call, chat, sent_inputs, steps
from tests.serving import Served

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def _tokens(*texts: str) -> list[dict[str, Any]]:
    """Log probabilities as the backend gives them: the chosen token is the second best."""
    return [
        {
            "7": {"logprob": -1.5, "rank": 2, "decoded_token": text, "bytes": list(text.encode())},
            "8": {"logprob": -0.25, "rank": 1, "decoded_token": "é", "bytes": [0xC3, 0xA9]},
        }
        for text in texts
    ]


def test_a_stream_begins_with_the_role_and_ends_without_content(front: Served) -> None:
    events = chat(front, steps("Hel", "lo"), stream=True).events
    choices = [event["choices"][0] for event in events]
    assert choices[0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert [c["delta"] for c in choices[1:]] == [{"content": "Hel"}, {"content": "lo"}, {}]
    assert [c["finish_reason"] for c in choices] == [None, None, None, "stop"]


def test_all_chunks_have_one_id(front: Served) -> None:
    events = chat(front, steps("a", "b", "c"), stream=True).events
    assert len({(e["id"], e["created"], e["model"], e["object"]) for e in events}) == 1
    assert events[0]["id"].startswith("chatcmpl-") and events[0]["object"] == "chat.completion.chunk"
    assert chat(front, steps("a"), stream=True).events[0]["id"] != events[0]["id"]


def test_usage_is_a_chunk_of_its_own_where_it_is_asked_for(front: Served) -> None:
    events = chat(front, steps("a", "b"), stream=True, stream_options={"include_usage": True}).events
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 2,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    assert all(event["usage"] is None for event in events[:-1])
    assert all("usage" not in event for event in chat(front, steps("a"), stream=True).events)


def test_a_whole_answer(front: Served) -> None:
    answer = chat(front, steps("Grüße ", "👩‍👧", reason="length")).json
    message = {"role": "assistant", "content": "Grüße 👩‍👧", "refusal": None}
    assert answer["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": "length"}]
    assert answer["object"] == "chat.completion"
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}


def test_a_stream_is_ascii_and_gives_the_text_back(front: Served) -> None:
    """Some clients split lines at U+2028 or U+0085 as well."""
    text = 'a\u2028b\u0085c\n\n\r\nd 你好 👩‍👧 " \\ \x00'
    events = chat(front, steps(text), stream=True).events
    assert "".join(e["choices"][0]["delta"].get("content", "") for e in events) == text


def test_proxies_are_told_not_to_hold_a_stream_back(front: Served) -> None:
    headers = chat(front, steps("a"), stream=True).headers
    assert (headers["cache-control"], headers["x-accel-buffering"]) == ("no-cache", "no")


def test_texts_that_are_held_back_make_no_chunk(front: Served) -> None:
    events = chat(front, steps("", "a", "", ""), stream=True).events
    assert [e["choices"][0]["delta"].get("content") for e in events] == ["", "a", None]


def test_n_answers_keep_their_indexes_and_end_once(front: Served) -> None:
    script = [
        {"text": ["a", "x"], "reason": ["None", "None"]},
        {"text": ["b", ""], "reason": ["None", "length"]},
        {"text": ["c", ""], "reason": ["stop", "length"]},  # the backend may repeat why an answer ended
    ]
    events = chat(front, script, stream=True, n=2).events
    of = {i: [e["choices"][0] for e in events if e["choices"][0]["index"] == i] for i in (0, 1)}
    assert [c["delta"].get("content") for c in of[0]] == ["", "a", "b", "c", None]
    assert [c["delta"].get("content") for c in of[1]] == ["", "x", None]
    assert [c["finish_reason"] for c in of[0]][-1:] == ["stop"] and of[1][-1]["finish_reason"] == "length"
    whole = chat(front, script, n=2).json
    assert [c["message"]["content"] for c in whole["choices"]] == ["abc", "x"]
    assert [c["index"] for c in whole["choices"]] == [0, 1]


def test_logprobs_have_the_bytes_of_tokens(front: Served) -> None:
    script = [
        {"text": ["a"], "reason": ["None"], "logprobs": [_tokens("a")]},
        {"text": [""], "reason": ["stop"], "logprobs": [_tokens("b")]},  # a token whose text is not out
    ]
    best = {"token": "é", "logprob": -0.25, "bytes": [195, 169]}
    expected = [{"token": text, "logprob": -1.5, "bytes": [ord(text)], "top_logprobs": [best]} for text in ("a", "b")]
    whole = chat(front, script, logprobs=True, top_logprobs=1).json
    assert whole["choices"][0]["logprobs"] == {"content": expected, "refusal": None}
    events = chat(front, script, logprobs=True, top_logprobs=1, stream=True).events
    found = [e["choices"][0]["logprobs"] for e in events if e["choices"][0]["logprobs"]]
    assert [entry for part in found for entry in part["content"]] == expected
    assert chat(front, script, logprobs=True).json["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_g35_no_logprobs_where_none_are_asked_for(front: Served) -> None:
    assert "logprobs" not in sent_inputs(chat(front))["sampling_parameters"]
    assert all(e["choices"][0]["logprobs"] is None for e in chat(front, steps("a"), stream=True).events)


def test_max_completion_tokens_goes_before_max_tokens(front: Served) -> None:
    both = sent_inputs(chat(front, max_tokens=5, max_completion_tokens=7))
    assert both["sampling_parameters"]["max_tokens"] == 7
    assert sent_inputs(chat(front, max_tokens=5))["sampling_parameters"]["max_tokens"] == 5
    assert sent_inputs(chat(front))["sampling_parameters"]["max_tokens"] == 2**31 - 1  # the context ends it


def test_sampling_fields_reach_the_engine(front: Served) -> None:
    fields: dict[str, Any] = {
        "n": 3,
        "seed": -5,
        "stop": ["a", "b"],
        "logit_bias": {"12": -100, "7": 1.5},
        "temperature": 0,
        "top_p": 0.5,
        "presence_penalty": 1,
        "frequency_penalty": -1.25,
        "top_k": 4,
        "min_p": 0.1,
        "repetition_penalty": 1.5,
        "min_tokens": 2,
        "stop_token_ids": [1],
        "ignore_eos": True,
    }
    found = sent_inputs(chat(front, **fields, priority=-2, user="me", cache_salt="s", deadline_ms=2500))
    assert found["sampling_parameters"] == {**fields, "max_tokens": 2**31 - 1}
    options = {name: found[name] for name in ("priority", "client", "cache_salt", "deadline_ms")}
    assert options == {"priority": -2, "client": "me", "cache_salt": "s", "deadline_ms": 2500.0}


def test_the_defaults_are_those_of_the_api_and_null_is_the_default(front: Served) -> None:
    found = sent_inputs(chat(front, temperature=None, top_p=None, n=None, stop=None))["sampling_parameters"]
    assert (found["temperature"], found["top_p"]) == (1.0, 1.0)
    assert found.get("n", 1) == 1 and "stop" not in found and "seed" not in found


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"json_object": True}),
        ({"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "null"}}}, {"json": {"type": "null"}}),
    ],
)
def test_response_formats_become_structured_outputs(front: Served, form: Any, expected: Any) -> None:
    found = sent_inputs(chat(front, response_format=form))
    assert found["sampling_parameters"].get("structured_outputs") == expected


def test_the_template_is_applied_once_without_a_second_bos(front: Served) -> None:
    """<bos> is token 0: the template writes it, and the tokenizer would put one more before the text."""
    ids = sent_inputs(chat(front))["input_ids"]
    assert ids == [0, 2, 76, 77, 3]  # <bos> <user> h i <assistant>
    completion = sent_inputs(call(front, "POST", "/v1/completions", {"model": "scripted", "prompt": "hi"}))
    assert completion["input_ids"] == [0, 76, 77]


def test_messages_reach_the_template_as_it_expects_them(front: Served, folder: Path) -> None:
    call_made = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    without_arguments = {"id": "c2", "type": "function", "function": {"name": "now", "arguments": ""}}
    messages = [
        {"role": "developer", "content": "S"},
        {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]},
        {"role": "assistant", "content": None, "tool_calls": [call_made, without_arguments]},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
    ]
    ids = sent_inputs(chat(front, messages=messages))["input_ids"]
    text = load_tokenizer(folder / "repository" / "scripted" / "1").decode(ids, skip_special_tokens=False)
    assert text == '<bos><system>S<user>x\ny<assistant>[add {"a": 1}][now {}]<tool>2<assistant>'


def test_the_template_is_given_what_it_may_ask_for(front: Served) -> None:
    """Qwen3's asks for enable_thinking. What is the request's own cannot be given so."""
    plain = sent_inputs(chat(front))["input_ids"]
    assert sent_inputs(chat(front, chat_template_kwargs={"enable_thinking": True}))["input_ids"] == plain
    settings = {"enable_thinking": False, "messages": [], "bos_token": "x", "add_generation_prompt": False}
    assert sent_inputs(chat(front, chat_template_kwargs=settings))["input_ids"] == [*plain, 82, 83]  # n o
    assert chat(front, chat_template_kwargs=[]).error["param"] == "chat_template_kwargs"


def test_tools_go_into_the_template_unless_the_choice_is_none(front: Served) -> None:
    without = len(sent_inputs(chat(front))["input_ids"])
    assert len(sent_inputs(chat(front, tools=[TOOL]))["input_ids"]) > without + 50
    assert len(sent_inputs(chat(front, tools=[TOOL], tool_choice="none"))["input_ids"]) == without


def test_tool_calls_come_back_parsed(front: Served) -> None:
    script = steps("Let me see.\n", "<tool", '_call>\n{"name": "add", "arg', 'uments": {"a": "ü"}}\n</tool_call>')
    whole = chat(front, script, tools=[TOOL]).json["choices"][0]
    assert whole["finish_reason"] == "tool_calls" and whole["message"]["content"] == "Let me see."
    (made,) = whole["message"]["tool_calls"]
    assert made["type"] == "function" and made["id"].startswith("call_")
    assert made["function"]["name"] == "add" and json.loads(made["function"]["arguments"]) == {"a": "ü"}
    deltas = [e["choices"][0] for e in chat(front, script, tools=[TOOL], stream=True).events]
    assert "".join(d["delta"].get("content") or "" for d in deltas) == "Let me see."
    (call_delta,) = [d["delta"]["tool_calls"][0] for d in deltas if "tool_calls" in d["delta"]]
    assert call_delta["index"] == 0 and json.loads(call_delta["function"]["arguments"]) == {"a": "ü"}
    assert deltas[-1]["finish_reason"] == "tool_calls"


def test_log_probabilities_stream_beside_tools(front: Served) -> None:
    texts = ("Hm", "<tool_call>", '{"name": "add"}</tool_call>')
    script = [{"text": [text], "reason": ["None"], "logprobs": [_tokens(text)]} for text in texts]
    script[-1]["reason"] = ["stop"]
    fields: dict[str, Any] = {"tools": [TOOL], "logprobs": True, "top_logprobs": 1}
    whole = chat(front, script, **fields).json["choices"][0]["logprobs"]["content"]
    choices = [e["choices"][0] for e in chat(front, script, stream=True, **fields).events]
    assert [token for c in choices for token in (c["logprobs"] or {"content": []})["content"]] == whole
    assert [token["token"] for token in whole] == list(texts)
    assert "".join(c["delta"].get("content") or "" for c in choices) == "Hm"
    assert [c["delta"]["tool_calls"][0]["function"]["name"] for c in choices if "tool_calls" in c["delta"]] == ["add"]


def test_a_client_may_want_one_call_at_most(front: Served) -> None:
    script = steps('<tool_call>{"name": "add", "arguments": {}}</tool_call>' * 2)
    for parallel, expected in ((None, 2), (True, 2), (False, 1)):
        answer = chat(front, script, tools=[TOOL], parallel_tool_calls=parallel).json["choices"][0]
        assert len(answer["message"]["tool_calls"]) == expected and answer["message"]["content"] is None


def test_a_tag_stays_text_where_no_tools_were_given(front: Served) -> None:
    text = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    assert chat(front, steps(text)).json["choices"][0]["message"]["content"] == text


def test_a_forced_tool_is_a_schema_for_the_engine_and_its_arguments_stream(front: Served) -> None:
    choice = {"type": "function", "function": {"name": "add"}}
    sent = chat(front, tools=[TOOL], tool_choice=choice).json["choices"][0]["message"]["tool_calls"][0]
    inputs = json.loads(json.loads(sent["function"]["arguments"])["sampling_parameters"])
    assert inputs["structured_outputs"] == {"json": {"type": "object"}}
    refused = chat(front, tools=[TOOL], tool_choice={"type": "function", "function": {"name": "sub"}})
    assert refused.status == 400 and refused.error["param"] == "tool_choice"


def test_unknown_fields_are_ignored_and_logged(front: Served, logged: Callable[[str], str]) -> None:
    assert chat(front, steps("a"), store=True, no_such_field=[1]).status == 200
    assert "ignored fields" in logged("'no_such_field', 'store'")


def test_a_request_has_one_log_line_and_its_own_id_back(front: Served, logged: Callable[[str], str]) -> None:
    body = {"model": "scripted", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    answer = call(front, "POST", "/v1/chat/completions", body, x_request_id="my-request-17")
    assert answer.headers["x-request-id"] == "my-request-17"
    line = logged("id=my-request-17 ")
    for part in ("status=200", "model=scripted", "prompt_tokens=5", "completion_tokens=1", "ttft_ms=", "duration_ms="):
        assert part in line
    call(front, "POST", "/v1/chat/completions", {**body, "stream": False}, x_request_id="whole-18")
    assert " ttft_ms=- " in logged("id=whole-18 ")  # h11: there is no first token to time
    assert call(front, "GET", "/v1/models", x_request_id="two words\u00e9").headers["x-request-id"].startswith("req-")
