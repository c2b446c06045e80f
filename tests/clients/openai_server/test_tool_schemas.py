"""The schema of a call of one of several functions, with references as pydantic writes them."""

from __future__ import annotations

from typing import Any

from clients.openai_server.tool_schemas import required_schema

AT = "#/anyOf/0/properties/arguments"


def _arguments(schema: dict[str, Any]) -> Any:
    return required_schema([("f", schema)])["anyOf"][0]["properties"]["arguments"]


def test_the_schema_of_a_required_call_names_every_function() -> None:
    schema = required_schema([("add", {"type": "object", "properties": {"a": {"type": "integer"}}}), ("now", None)])
    assert [form["properties"]["name"] for form in schema["anyOf"]] == [{"const": "add"}, {"const": "now"}]
    assert schema["anyOf"][0]["properties"]["arguments"]["properties"] == {"a": {"type": "integer"}}
    assert schema["anyOf"][1]["properties"]["arguments"] == {"type": "object"}


def test_references_of_each_function_are_to_its_own_schema() -> None:
    item = {"$defs": {"Item": {"properties": {"next": {"$ref": "#/$defs/Item"}}}}, "anyOf": [{"$ref": "#/$defs/Item"}]}
    forms = required_schema([("a", item), ("b", item)])["anyOf"]
    for number, form in enumerate(forms):
        reference = {"$ref": f"#/anyOf/{number}/properties/arguments/$defs/Item"}
        arguments = form["properties"]["arguments"]
        assert arguments == {"$defs": {"Item": {"properties": {"next": reference}}}, "anyOf": [reference]}


def test_a_reference_to_the_whole_schema() -> None:
    tree = {"properties": {"children": {"items": {"$ref": "#"}}}}
    assert _arguments(tree) == {"properties": {"children": {"items": {"$ref": AT}}}}


def test_what_is_no_reference_to_the_root_stays() -> None:
    for schema in (
        {"const": {"$ref": "#/x"}, "enum": [{"$ref": "#"}], "default": {"$ref": "#"}, "examples": [{"$ref": "#"}]},
        {"$ref": "#anchor"},
        {"$ref": "other.json#/x"},
        {"$id": "urn:x", "$ref": "#/$defs/a", "$defs": {"a": {"type": "string"}}},
    ):
        assert _arguments(schema) == schema


def test_properties_may_have_the_names_of_keywords() -> None:
    reference, moved = {"$ref": "#/$defs/a"}, {"$ref": f"{AT}/$defs/a"}
    schema = {"properties": {"$ref": {"type": "string"}, "enum": reference, "const": reference, "$id": reference}}
    expected = {"properties": {"$ref": {"type": "string"}, "enum": moved, "const": moved, "$id": moved}}
    assert _arguments(schema) == expected
