"""Errors in OpenAI's shape with the right status, before and after an answer has begun."""

from __future__ import annotations

import gzip
import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from openai import APIError, OpenAI

from tests.clients.openai_server.http_calls import call, chat, complete, steps
from tests.serving import COMPILE, Served, environment

KINDS = [
    ("[invalid_request:temperature] temperature is -1; allowed: 0 or more", 400, "temperature", None),
    ("[context_length_exceeded] 5000 tokens; allowed: 4096", 400, "messages", "context_length_exceeded"),
    ("[invalid_request:structured_outputs] Invalid type: x", 400, "structured_outputs", None),  # the script was sent so
    ("[overloaded] 64 requests wait; allowed: 64", 429, None, "overloaded"),
    ("[deadline] the answer can be there in 90 ms at the earliest", 503, None, "deadline_exceeded"),
    ("[internal] IndexError at /opt/models/x.py:17", 500, None, "internal"),
    ("Traceback (most recent call last): /opt/models/x.py", 500, None, "internal"),
]


@pytest.mark.parametrize(("text", "status", "param", "code"), KINDS, ids=[k[0][:12] for k in KINDS])
@pytest.mark.parametrize("stream", [False, True])
def test_the_engines_errors(front: Served, text: str, status: int, param: str, code: str, stream: bool) -> None:
    answer = chat(front, [{"error": text}], stream=stream)
    assert answer.status == status and answer.headers["content-type"] == "application/json"
    assert (answer.error["param"], answer.error["code"]) == (param, code)
    assert "/opt" not in answer.body.decode() and "Traceback" not in answer.body.decode()
    if status == 429:
        assert answer.error["type"] == "rate_limit_error" and answer.headers["retry-after"] == "1"
    if code == "deadline_exceeded":
        assert answer.headers["x-should-retry"] == "false"


def test_a_failure_in_mid_stream_is_an_event(front: Served, client: OpenAI) -> None:
    script = [*steps("a", reason="None"), {"error": "[internal] /opt/x.py"}]
    answer = chat(front, script, stream=True)
    assert answer.status == 200
    events = answer.body.decode().strip().split("\n\n")
    assert '"content":"a"' in events[1] and "[DONE]" not in answer.body.decode()
    error = json.loads(events[-1].removeprefix("data: "))["error"]
    assert error["type"] == "server_error" and "/opt" not in error["message"]
    messages: Any = [{"role": "user", "content": "x"}]
    stream = client.chat.completions.create(
        model="scripted", messages=messages, stream=True, extra_body={"structured_outputs": {"script": script}}
    )
    with pytest.raises(APIError, match="its log says why"):
        list(stream)


def test_an_answer_that_the_server_ends_is_an_error(front: Served) -> None:
    assert chat(front, steps("a", reason="deadline")).error["code"] == "deadline_exceeded"
    assert chat(front, steps("a", reason="abort")).status == 503


INVALID: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"role": "nobody", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type"),
    ({"temperature": "1"}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"n": 0}, "n"),
    ({"n": 10**30}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"seed": 2**63}, "seed"),
    ({"logit_bias": {"x": 1}}, "logit_bias.x"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": ""}, "stop"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema.schema"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
    ({"model": 5}, "model"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), INVALID, ids=[json.dumps(f)[:40] for f, _ in INVALID])
def test_a_wrong_field_is_named(front: Served, fields: dict[str, Any], param: str) -> None:
    answer = chat(front, **fields)
    assert answer.status == 400 and answer.error["type"] == "invalid_request_error"
    assert answer.error["param"] == param and param in answer.error["message"]


def test_a_missing_field_is_named(front: Served) -> None:
    for path, body, param in (
        ("/v1/chat/completions", {"model": "scripted"}, "messages"),
        ("/v1/completions", {"model": "scripted"}, "prompt"),
        ("/v1/embeddings", {"input": "x"}, "model"),
    ):
        answer = call(front, "POST", path, body)
        assert (answer.status, answer.error["param"]) == (400, param)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"5", b"\xff\xfe", b'{"model": NaN}', b'{"model": "\\ud800"}', b'{"model": "\xed\xa0\x80"}'],
)
def test_what_is_no_json_object(front: Served, body: bytes) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/embeddings"):
        assert call(front, "POST", path, body).status == 400


@pytest.mark.parametrize("number", ["1e999", "-1e999", "1" + "0" * 400, "NaN", "Infinity"])
def test_numbers_that_are_no_json_or_too_large(front: Served, number: str) -> None:
    body = b'{"model": "scripted", "prompt": "x", "temperature": %s, "max_tokens": %s}' % ((number.encode(),) * 2)
    assert call(front, "POST", "/v1/completions", body).status == 400


def test_unknown_models_paths_and_methods(front: Served) -> None:
    answer = complete(front, model="no-such-model")
    assert answer.status == 404 and answer.error["code"] == "model_not_found"
    assert "allowed: scripted, tiny" in answer.error["message"]
    assert call(front, "POST", "/v1/chat/completions", {"model": "embedder", "messages": [{"role": "user", "content": "x"}]}).status == 400  # fmt: skip  # noqa: E501
    assert call(front, "GET", "/v1/nothing").error["code"] == "not_found"
    assert call(front, "GET", "/v1/completions").status == 405


def test_other_content_types_are_refused(front: Served) -> None:
    """A web page can make a browser send them anywhere without asking."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
        answer = call(front, "POST", "/v1/completions", b'{"model": "scripted", "prompt": "x"}', content_type=kind)
        assert answer.status == 415 and answer.error["code"] == "unsupported_media_type"
    body = {"model": "scripted", "prompt": "x"}
    assert call(front, "POST", "/v1/completions", body, content_type="Application/JSON; charset=utf-8").status == 200


def test_bodies_that_are_compressed_are_refused_by_their_head(front: Served) -> None:
    body = {"model": "scripted", "prompt": "x"}
    answer = call(front, "POST", "/v1/completions", gzip.compress(json.dumps(body).encode()), content_encoding="gzip")
    assert answer.status == 415 and answer.error["code"] == "unsupported_media_type"
    assert "content encoding is 'gzip'" in answer.error["message"]
    assert call(front, "POST", "/v1/completions", body, content_encoding="identity").status == 200


def test_a_prompt_that_cannot_fit_is_refused_before_it_is_tokenised(front: Served) -> None:
    for answer in (
        complete(front, prompt="x" * 50_000_000),
        chat(front, messages=[{"role": "user", "content": "x" * 50_000_000}]),
    ):
        assert answer.status == 400 and answer.error["code"] == "context_length_exceeded"
        assert "50000000 characters" in answer.error["message"] and "4096" in answer.error["message"]


@pytest.mark.parametrize("name", ["../../x", "a/b", "", ".", "a\nb", "embedder/../scripted", "/etc"])
def test_i06_a_name_with_path_parts_is_a_model_that_does_not_exist(front: Served, folder: Path, name: str) -> None:
    """Nothing of the file system is looked at for it, and the error names none of it."""
    for answer in (
        complete(front, model=name, prompt="x"),
        chat(front, model=name),
        call(front, "POST", "/v1/embeddings", {"model": name, "input": "x"}),
    ):
        assert answer.status == 404 and answer.error["code"] == "model_not_found"
        assert str(folder) not in answer.error["message"] and "\n" not in answer.error["message"]
    if name:  # without one it is the list
        assert call(front, "GET", f"/v1/models/{quote(name, safe='')}").status == 404


def test_a_key_is_asked_for_and_shown_nowhere(front: Served, folder: Path) -> None:
    """By a second front end on the same Triton, started alone."""
    (folder / "key").write_text("s3cret-key\n")
    with front_end(front.grpc, folder, "--api-key-file", str(folder / "key")) as second:
        for wrong in ("", "Bearer no", "s3cret-key", "Bearer ", "Basic s3cret-key"):
            answer = call(second, "GET", "/v1/models", authorization=wrong)
            assert answer.status == 401 and answer.error["code"] == "invalid_api_key"
        assert call(second, "GET", "/v1/models").status == 401
        assert call(second, "GET", "/v1/models", authorization="Bearer s3cret-key").status == 200
        assert call(second, "GET", "/health").status == 200
        assert "s3cret" not in Path(f"/proc/{second.openai_pid}/cmdline").read_text()
        schema = call(second, "GET", "/openapi.json").json
        assert schema["paths"]["/v1/models"]["get"]["security"] == [{"key": []}]
    assert "s3cret" not in (folder / "log-second").read_text()


@contextmanager
def front_end(triton: str, folder: Path, *arguments: str) -> Iterator[Served]:
    """Runs `compile openai` on a free port."""
    command = [*COMPILE, "openai", "--triton", triton, "-r", str(folder / "repository"), "--port", "0", "--json"]
    with open(folder / "log-second", "w") as log:
        process = subprocess.Popen(
            [*command, *arguments], stdout=subprocess.PIPE, stderr=log, text=True, env=environment()
        )
    try:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["openai"]
        yield Served(process, "", triton, "", [], 0, url, process.pid)
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        process.communicate()
