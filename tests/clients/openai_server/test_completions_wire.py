"""Completions and embeddings on the wire."""

from __future__ import annotations

import base64
import struct
from typing import Any

import pytest

from tests.clients.openai_server.http_calls import call, complete, sent_inputs, steps
from tests.serving import Served


def _embed(front: Served, **fields: Any) -> Any:
    return call(front, "POST", "/v1/embeddings", {"model": "embedder", **fields})


def test_a_stream_of_text(front: Served) -> None:
    events = complete(front, steps("a", "b"), stream=True, stream_options={"include_usage": True}).events
    choices = [e["choices"][0] for e in events[:-1]]
    assert [(c["text"], c["finish_reason"]) for c in choices] == [("a", None), ("b", None), ("", "stop")]
    assert events[0]["object"] == "text_completion" and events[0]["id"].startswith("cmpl-")
    assert len({e["id"] for e in events}) == 1
    assert events[-1]["usage"]["completion_tokens"] == 2


def test_a_completion_has_16_tokens_by_default(front: Served) -> None:
    assert sent_inputs(complete(front))["sampling_parameters"]["max_tokens"] == 16
    assert sent_inputs(complete(front, max_tokens=3))["sampling_parameters"]["max_tokens"] == 3


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("hi", [[0, 76, 77]]), ([76, 9], [[76, 9]]), (["h", "i"], [[0, 76], [0, 77]]), ([[5], [6, 7]], [[5], [6, 7]])],
)
def test_all_forms_of_prompts(front: Served, prompt: Any, expected: Any) -> None:
    answer = complete(front, prompt=prompt).json
    found = [sent_inputs_of["text"] for sent_inputs_of in answer["choices"]]
    assert [f'"input_ids": {ids}' in text for ids, text in zip(expected, found, strict=True)] == [True] * len(found)
    assert [c["index"] for c in answer["choices"]] == list(range(len(expected)))
    assert answer["usage"]["prompt_tokens"] == sum(map(len, expected))


def test_answers_to_several_prompts_are_counted_through(front: Served) -> None:
    script = [{"text": ["x", "y"], "reason": ["stop", "length"]}]
    whole = complete(front, script, prompt=["a", "b"], n=2).json["choices"]
    assert [(c["index"], c["text"], c["finish_reason"]) for c in whole] == [
        (0, "x", "stop"),
        (1, "y", "length"),
        (2, "x", "stop"),
        (3, "y", "length"),
    ]
    events = complete(front, script, prompt=["a", "b"], n=2, stream=True).events
    assert sorted(e["choices"][0]["index"] for e in events) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_more_prompts_than_run_at_once(front: Served) -> None:
    prompts = [[i] for i in range(5, 105)]
    choices = complete(front, prompt=prompts).json["choices"]
    assert [f'"input_ids": [{i}]' in c["text"] for i, c in zip(range(5, 105), choices, strict=True)] == [True] * 100


def test_echo_puts_the_prompt_before_every_answer(front: Served) -> None:
    assert complete(front, steps("!"), echo=True).json["choices"][0]["text"] == "hi!"
    assert complete(front, steps("!"), echo=True, prompt=[76, 77]).json["choices"][0]["text"] == "hi!"
    events = complete(front, steps("!"), echo=True, stream=True).events
    assert "".join(e["choices"][0]["text"] for e in events) == "hi!"
    assert complete(front, echo=True, logprobs=1, stream=True).error["param"] == "echo"
    answer = complete(front, echo=True, logprobs=1)  # this model has no output for them
    assert answer.error["param"] == "echo" and "gives no log probabilities of a prompt" in answer.error["message"]


def test_logprobs_in_the_older_form(front: Served) -> None:
    token = {"7": {"logprob": -0.5, "rank": 1, "decoded_token": "ab", "bytes": [97, 98]}}
    script = [{"text": ["ab"], "reason": [r], "logprobs": [[token]]} for r in ("None", "stop")]
    expected = {
        "tokens": ["ab", "ab"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"ab": -0.5}, {"ab": -0.5}],
        "text_offset": [0, 2],
    }
    assert complete(front, script, logprobs=1).json["choices"][0]["logprobs"] == expected
    events = complete(front, script, logprobs=1, stream=True).events
    assert [e["choices"][0]["logprobs"]["text_offset"] for e in events[:2]] == [[0], [2]]


def test_the_chosen_token_is_among_the_top_logprobs(front: Served) -> None:
    """As the API has it: up to one more than were asked for. The engine gives the chosen one first."""
    ranks = {"a": 3, "b": 1, "c": 2, "\ufffd": 4}
    texts = {
        str(i): {"logprob": -float(rank), "rank": rank, "decoded_token": text, "bytes": []}
        for i, (text, rank) in enumerate(ranks.items())
    }
    script = [{"text": ["a"], "reason": ["stop"], "logprobs": [[texts]]}]
    for num, expected in ((2, {"b": -1, "c": -2, "a": -3}), (0, {"a": -3}), (3, {"b": -1, "c": -2, "a": -3})):
        found = complete(front, script, logprobs=num).json["choices"][0]["logprobs"]
        assert found["top_logprobs"] == [expected] and found["token_logprobs"] == [-3]


def test_embeddings_in_batches_of_what_the_model_takes(front: Served) -> None:
    """The embedder answers (length, texts in its batch, first byte, 0.5) and takes four at once."""
    answer = _embed(front, input=["a", "bb", "ccc", "dddd", "e"]).json
    vectors = [entry["embedding"] for entry in answer["data"]]
    assert [(v[0], v[2]) for v in vectors] == [(1, 97), (2, 98), (3, 99), (4, 100), (1, 101)]
    assert [entry["index"] for entry in answer["data"]] == [0, 1, 2, 3, 4]
    assert answer["usage"] == {"prompt_tokens": 16, "total_tokens": 16}  # 11 bytes, and <bos> before each text
    assert _embed(front, input="é").json["data"][0]["embedding"] == [2, 1, 0xC3, 0.5]


def test_embeddings_as_base64_are_little_endian_floats(front: Served) -> None:
    text = _embed(front, input="abc", encoding_format="base64").json["data"][0]["embedding"]
    assert struct.unpack("<4f", base64.b64decode(text)) == (3, 1, 97, 0.5)


def test_embeddings_refuse_what_they_cannot_do(front: Served) -> None:
    assert _embed(front, input="a", dimensions=4).status == 200
    refused = _embed(front, input="a", dimensions=2)
    assert refused.status == 400 and refused.error["param"] == "dimensions"
    assert "allowed for this model: 4" in refused.error["message"]
    assert _embed(front, input=[]).error["param"] == "input"
    wrong = call(front, "POST", "/v1/embeddings", {"model": "scripted", "input": "a"})
    assert wrong.status == 400 and wrong.error["code"] == "model_not_supported"


def test_models_are_those_that_this_api_can_use(front: Served) -> None:
    """Triton has one more, which takes numbers."""
    listed = call(front, "GET", "/v1/models").json
    assert [m["id"] for m in listed["data"]] == ["embedder", "scripted", "tiny"]
    assert [m["max_model_len"] for m in listed["data"]] == [None, 4096, None]
    assert call(front, "GET", "/v1/models/scripted").json == listed["data"][1]
    assert call(front, "GET", "/v1/models/identity").status == 404
