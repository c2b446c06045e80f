"""The schema of an answer that must call one of several functions. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_DATA = ("const", "default", "enum", "example", "examples")  # their values are no schemas
_BY_NAME = ("$defs", "definitions", "dependentSchemas", "patternProperties", "properties")  # of theirs each is one


def required_schema(functions: Sequence[tuple[str, dict[str, Any] | None]]) -> dict[str, Any]:
    """Returns the schema of a call of one of the functions, given by name and schema of the arguments."""
    return {
        "anyOf": [
            {
                "type": "object",
                "properties": {
                    "name": {"const": name},
                    "arguments": _moved(schema or {"type": "object"}, f"#/anyOf/{number}/properties/arguments"),
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for number, (name, schema) in enumerate(functions)
        ]
    }


def _moved(schema: Any, place: str) -> Any:
    """Returns a schema that is put into another one: what it refers to from its root is found from the new root.

    Pydantic's schemas do so for every nested model. One with an `$id` is a root of its own wherever it is.
    """
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, dict) or isinstance(schema.get("$id"), str):
        return schema
    moved: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
            moved[key] = place + value[1:]
        elif key in _BY_NAME and isinstance(value, dict):
            moved[key] = {name: _moved(one, place) for name, one in value.items()}
        else:
            moved[key] = value if key in _DATA else _moved(value, place)
    return moved
