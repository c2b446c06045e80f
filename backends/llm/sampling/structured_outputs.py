"""StructuredOutputs: what the text of an answer must be, checked as far as that needs no tokenizer. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from backends.llm.errors import InvalidRequest

MAX_BYTES = 1 << 17  # of a schema, a regular expression, a list of choices, a grammar
MAX_DEPTH = 64  # of a schema's brackets
MAX_CHOICES = 1000

_KEYS = ("json", "json_object", "regex", "choice", "grammar")
_ALLOWED = (
    '{"json": a JSON schema}, {"json_object": true}, {"regex": "..."}, {"choice": ["...", ...]} or {"grammar": "..."}'
)


@dataclass(frozen=True)
class StructuredOutputs:
    """A language that the whole text of an answer belongs to.

    Attributes:
        kind: "json", "regex", "choice" or "grammar".
        text: the schema as JSON, the regular expression, the choices as a JSON list, the grammar (Lark or GBNF).
    """

    kind: str
    text: str


def structured_outputs_from(value: Any) -> StructuredOutputs:
    """Reads vLLM's JSON form: an object with exactly one key.

    Args:
        value: `{"json": schema or its text}`, `{"json_object": true}`, `{"regex": text}`, `{"choice": [text, ...]}`,
            `{"grammar": text}`; keys with null are passed over. A StructuredOutputs is returned as it is.

    Raises:
        InvalidRequest: it is none of these, too large or too deep; `param` is "structured_outputs".
    """
    if isinstance(value, StructuredOutputs):
        return value
    given = {k: v for k, v in value.items() if v is not None} if isinstance(value, Mapping) else {}
    if len(given) != 1 or not given.keys() <= set(_KEYS):
        _refuse(f"structured_outputs is {_short(value)}; allowed: exactly one of {_ALLOWED}")
    ((key, wanted),) = given.items()
    if key == "json":
        kind, text = "json", _schema_text(wanted)
    elif key == "json_object":
        if wanted is not True:
            _refuse(f"json_object is {_short(wanted)}; allowed: true, or no structured_outputs at all")
        kind, text = "json", '{"type": "object"}'
    elif key == "choice":
        kind, text = "choice", _choice_text(wanted)
    else:
        if not isinstance(wanted, str) or not wanted.strip():
            _refuse(f"{key} is {_short(wanted)}; allowed: a text that is not empty")
        kind, text = key, wanted
    _check_text(key, text)
    return StructuredOutputs(kind, text)


def _schema_text(schema: Any) -> str:
    """Returns a schema as JSON, its keys in the order in which they were given, for that is the order of the answer."""
    if isinstance(schema, str):
        _check_text("json", schema)
        try:
            schema = json.loads(schema, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            _refuse(f"the JSON schema cannot be read: {str(error)[:200]}")
    if not isinstance(schema, Mapping):
        _refuse(f"the JSON schema is {_short(schema)}; allowed: a JSON object")
    _check_depth(schema)
    try:
        return json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        _refuse(f"the JSON schema is not JSON: {error}")


def _choice_text(choices: Any) -> str:
    allowed = f"allowed: a list of 1 to {MAX_CHOICES} texts that are not empty"
    if isinstance(choices, str) or not isinstance(choices, Sequence) or not 1 <= len(choices) <= MAX_CHOICES:
        _refuse(f"choice is {_short(choices)}; {allowed}")
    for choice in choices:
        if not isinstance(choice, str) or not choice:
            _refuse(f"choice holds {_short(choice)}; {allowed}")
    return json.dumps(list(choices), ensure_ascii=False)


def _check_text(name: str, text: str) -> None:
    if len(text) <= MAX_BYTES:
        try:
            size = len(text.encode())
        except UnicodeEncodeError:
            _refuse(f"{name} is not Unicode text: it holds half of a surrogate pair")
        if size <= MAX_BYTES:
            return
    _refuse(f"{name} has {len(text)} characters; allowed: up to {MAX_BYTES} bytes")


def _check_depth(schema: Any) -> None:
    level: list[Any] = [schema]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for node in level
            for child in (
                node.values() if isinstance(node, Mapping) else node if isinstance(node, list | tuple) else ()
            )
        ]
        if not level:
            return
    _refuse(f"the JSON schema is nested more than {MAX_DEPTH} deep; allowed: up to {MAX_DEPTH} levels")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _short(value: object) -> str:
    seen = repr(value)
    return seen if len(seen) <= 80 else seen[:77] + "..."


def _refuse(message: str) -> NoReturn:
    raise InvalidRequest(message, param="structured_outputs")
