"""The JSON form of structured outputs: what is taken, and what is refused before any library sees it."""

from __future__ import annotations

import json

import pytest

from backends.llm import SamplingParams
from backends.llm.errors import InvalidRequest
from backends.llm.sampling.params_json import params_from_json
from backends.llm.sampling.structured_outputs import MAX_BYTES, MAX_DEPTH, StructuredOutputs, structured_outputs_from

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}


def nested(depth):
    schema: dict = {}
    for _ in range(depth - 1):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        ({"json": SCHEMA}, "json", json.dumps(SCHEMA)),
        ({"json": json.dumps(SCHEMA)}, "json", json.dumps(SCHEMA)),
        ({"json_object": True}, "json", '{"type": "object"}'),
        ({"regex": "[a-z]+"}, "regex", "[a-z]+"),
        ({"choice": ["yes", "é"]}, "choice", '["yes", "é"]'),
        ({"grammar": 'start: "a"'}, "grammar", 'start: "a"'),
        ({"grammar": 'start: "a"', "json": None, "regex": None}, "grammar", 'start: "a"'),
    ],
)
def test_taken(value, kind, text):
    assert structured_outputs_from(value) == StructuredOutputs(kind, text)
    params = SamplingParams(structured_outputs=value)
    assert params.structured_outputs == StructuredOutputs(kind, text)
    assert params_from_json({"structured_outputs": value}) == params
    assert SamplingParams(structured_outputs=params.structured_outputs) == params


def test_the_order_of_properties_is_kept():
    text = structured_outputs_from({"json": SCHEMA}).text
    assert list(json.loads(text)["properties"]) == ["b", "a"]


@pytest.mark.parametrize(
    "value",
    [
        {},
        [],
        "json",
        7,
        {"json": SCHEMA, "regex": "a"},
        {"jason": SCHEMA},
        {"json": None},
        {"json_object": False},
        {"json_object": "true"},
        {"json": []},
        {"json": True},
        {"json": "{"},
        {"json": '{"minimum": NaN}'},
        {"json": {"minimum": float("inf")}},
        {"json": {"const": {1, 2}}},
        {"json": {"const": "\ud800"}},
        {"json": '{"const": "\\ud800"}'},
        {"json": "[" * 100_000},
        {"json": nested(MAX_DEPTH + 1)},
        {"json": {"const": "x" * MAX_BYTES}},
        {"json": '"' + "x" * MAX_BYTES + '"'},
        {"regex": ""},
        {"regex": 3},
        {"regex": "é" * (MAX_BYTES // 2 + 1)},
        {"regex": "\ud800"},
        {"choice": []},
        {"choice": "yes"},
        {"choice": ["yes", ""]},
        {"choice": ["yes", 1]},
        {"choice": ["\udfff"]},
        {"choice": ["x"] * 1001},
        {"grammar": " \n"},
        {"grammar": ["a"]},
    ],
    ids=lambda value: repr(value)[:40],
)
def test_refused(value):
    with pytest.raises(InvalidRequest) as refused:
        SamplingParams(structured_outputs=value)
    assert refused.value.param == "structured_outputs"
    assert len(str(refused.value)) < 500


def test_the_largest_is_taken():
    assert structured_outputs_from({"json": nested(MAX_DEPTH)}).kind == "json"
    assert len(structured_outputs_from({"regex": "x" * MAX_BYTES}).text) == MAX_BYTES
