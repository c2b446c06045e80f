"""Tensors to requests: what is read, what goes before what, what is refused by the name of its field."""

from __future__ import annotations

import json

import numpy as np
import pytest

from backends.llm.errors import InvalidRequest, RequestRefused
from backends.llm.serving.requests import request_from_tensors


def strings(*values):
    return np.array([v if isinstance(v, bytes) else v.encode() for v in values], dtype=np.object_)


def tensors(**values):
    """Returns arrays of the types that Triton hands over."""
    kinds = {"temperature": np.float32, "top_p": np.float32, "deadline_ms": np.float32, "seed": np.int64}
    found = {}
    for name, value in values.items():
        if isinstance(value, (str, bytes)):
            found[name] = strings(value)
        elif isinstance(value, list) and value and isinstance(value[0], str):
            found[name] = strings(*value)
        else:
            kind = np.bool_ if isinstance(value, bool) else kinds.get(name, np.int32)
            found[name] = np.array(value if isinstance(value, list) else [value], dtype=kind)
    return found


def read(parameters="", timeout_us=0, default_deadline_ms=None, **values):
    return request_from_tensors(
        tensors(**values),
        max_model_len=64,
        parameters=parameters,
        timeout_us=timeout_us,
        default_deadline_ms=default_deadline_ms,
    )


def test_a_prompt_alone_has_the_defaults():
    request = read(text_input="Grüße")
    assert (request.prompt, request.prefix, request.stream, request.outputs) == ("Grüße", "Grüße", False, frozenset())
    assert (request.params.max_tokens, request.params.temperature, request.deadline_ms) == (16, 0.0, None)


def test_token_ids_are_taken_as_they_are_and_have_no_text_to_begin_with():
    request = read(input_ids=[1, 0, 5])
    assert request.prompt == (1, 0, 5) and request.prefix == ""


def test_every_input_arrives():
    request = read(
        text_input="a",
        stream=True,
        sampling_parameters='{"min_p": "0.25", "n": 2}',
        max_tokens=7,
        top_k=5,
        logprobs=2,
        temperature=0.7,
        top_p=0.95,
        seed=-(2**63),
        stop=["b", "cd"],
        priority=-3,
        client="me",
        cache_salt="salt",
        deadline_ms=1500.0,
        return_finish_reason=True,
        return_logprobs=False,
    )
    p = request.params
    assert (p.min_p, p.n, p.max_tokens, p.top_k, p.logprobs, p.seed, p.stop) == (
        0.25,
        2,
        7,
        5,
        2,
        -(2**63),
        ("b", "cd"),
    )
    # What JSON would have given, not the float32 nearest to it: 0.699999988.
    assert (p.temperature, p.top_p) == (0.7, 0.95)
    assert (request.priority, request.client, request.cache_salt, request.deadline_ms) == (-3, "me", "salt", 1500.0)
    assert request.stream and request.outputs == {"finish_reason"}


def test_typed_inputs_go_before_sampling_parameters():
    request = read(text_input="a", max_tokens=3, sampling_parameters='{"max_tokens": 9, "top_k": 4}')
    assert (request.params.max_tokens, request.params.top_k) == (3, 4)


def test_the_requests_own_parameters_stand_in_for_sampling_parameters():
    parameters = json.dumps({"repetition_penalty": 1.5, "max_tokens": "12", "something_of_a_proxy": "x"})
    request = read(parameters, text_input="a")
    assert (request.params.repetition_penalty, request.params.max_tokens) == (1.5, 12)
    # The client of Triton's vLLM backend sends both, and means the tensor.
    request = read(parameters, text_input="a", sampling_parameters='{"max_tokens": 9}')
    assert (request.params.repetition_penalty, request.params.max_tokens) == (1.0, 9)


@pytest.mark.parametrize(
    "stream, exclude, prefix",
    [(False, None, "a"), (False, True, ""), (False, False, "a"), (True, None, ""), (True, True, "")],
)
def test_an_answer_begins_with_the_prompt_unless_streamed_or_excluded(stream, exclude, prefix):
    given = {} if exclude is None else {"exclude_input_in_output": exclude}
    assert read(text_input="a", stream=stream, **given).prefix == prefix


@pytest.mark.parametrize(
    "timeout_us, given, default, wanted",
    [(0, None, None, None), (0, None, 9.0, 9.0), (2000, None, 9.0, 2.0), (2000, 1.0, 9.0, 1.0), (2000, 5.0, None, 2.0)],
)
def test_the_earliest_deadline_counts_and_the_default_only_without_one(timeout_us, given, default, wanted):
    values = {} if given is None else {"deadline_ms": given}
    assert read("", timeout_us, default, text_input="a", **values).deadline_ms == wanted


def test_g35_log_probabilities_are_computed_where_they_are_asked_for_alone():
    assert read(text_input="a").params.logprobs is None
    assert read(text_input="a", return_logprobs=True).params.logprobs == 0
    assert read(text_input="a", return_cumulative_logprob=True).params.logprobs == 0
    assert read(text_input="a", return_logprobs=True, logprobs=3).params.logprobs == 3


@pytest.mark.parametrize(
    "values, field, words",
    [
        ({}, "text_input", "neither text_input nor input_ids is given"),
        ({"text_input": "a", "input_ids": [1]}, "text_input", "both text_input and input_ids are given"),
        ({"text_input": b"\xff"}, "text_input", "not UTF-8 at byte 0"),
        ({"text_input": ["a", "b"]}, "text_input", r"has the shape \[2\]; allowed: \[1\]"),
        ({"sampling_parameters": "{"}, "sampling_parameters", "not valid JSON"),
        ({"sampling_parameters": "[" * 100_000}, "sampling_parameters", "nested too deeply"),
        ({"sampling_parameters": '{"top_k": ' + "9" * 5000 + "}"}, "sampling_parameters", "not valid JSON"),
        ({"sampling_parameters": "[1]"}, "sampling_parameters", "is a JSON list; allowed: an object"),
        ({"sampling_parameters": '{"temprature": 1}'}, "temprature", "did you mean 'temperature'"),
        ({"sampling_parameters": '{"temperature": NaN}'}, "temperature", "temperature is nan"),
        ({"sampling_parameters": '{"prompt_logprobs": 21}'}, "prompt_logprobs", "an integer from 0 to 20"),
        ({"temperature": -1.0}, "temperature", "temperature is -1.0; allowed: a number of 0 or more"),
        ({"temperature": float("nan")}, "temperature", "temperature is nan"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens is 0"),
        ({"stop": ["a", b"\xc3"]}, "stop", "not UTF-8"),
        ({"stop": ["", "b"]}, "stop", "stop is ''"),
        ({"deadline_ms": -1.0}, "deadline_ms", "deadline_ms is -1.0"),
        ({"deadline_ms": float("nan")}, "deadline_ms", "deadline_ms is nan"),
        ({"stream": True, "exclude_input_in_output": False}, "exclude_input_in_output", "stream is true"),
        ({"return_token_ids": True, "sampling_parameters": '{"n": 2}'}, "return_token_ids", "n is 2; allowed: n of 1"),
    ],
)
def test_what_is_wrong_is_refused_by_its_name(values, field, words):
    given = values if "text_input" in values or not values else {"text_input": "a", **values}
    with pytest.raises(InvalidRequest, match=words) as refused:
        read(**given)
    assert refused.value.param == field and len(str(refused.value)) < 500


def test_token_ids_that_never_fit_are_refused_before_they_are_copied():
    assert len(read(input_ids=[1] * 63).prompt) == 63
    with pytest.raises(RequestRefused, match="the prompt has 64 tokens, 63 are allowed") as refused:
        read(input_ids=[1] * 64)
    assert refused.value.code == "too_long"
