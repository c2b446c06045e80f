"""Reports as JSON and back: dataclasses to documents, checked against their annotations when they are read."""

from __future__ import annotations

import json
import types
import typing
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

from perf.errors import UsageError

_WORDS = ("true", "false", "null", "-", ".", "e-", "e+", "E-", "E+")  # of which the beginning is no JSON


def to_json(report: Any) -> str:
    """A report, which is a dataclass, as JSON."""
    return json.dumps(asdict(report), indent=2, allow_nan=False) + "\n"


def read_text(path: Path) -> str:
    """The text of a report's file; raises `UsageError` when there is none."""
    try:
        return path.read_text("utf-8")
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not a perf report: {error}") from error


def document_from_json(text: str, source: str) -> Any:
    """The document in `text`; raises `UsageError`, naming `source`, when it is not JSON."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        # A file that was not written to its end is nobody's syntax error: the fault is what is left, or a begun word.
        rest = text[error.pos :].rstrip()
        cut = error.msg.startswith("Unterminated string") or any(word.startswith(rest) for word in _WORDS)
        problem = f"is cut: it ends within its JSON, after {len(text)} characters" if cut else f"is not JSON: {error}"
        raise UsageError(f"{source} {problem}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{source} is not JSON: {error}") from error


def report_from_document(kind: Any, schema: str, document: Any, source: str) -> Any:
    """A report of the class `kind`, which has levels with measurements.

    Raises:
        UsageError: not a whole report, or one of another schema; names `source`.
    """
    found = schema_of(document)
    if found != schema:
        raise UsageError(f"{source} has the schema {found!r}; this version reads {schema!r}")
    try:
        report = _decode(kind, document)
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{source} is no whole perf report: {type(error).__name__}: {error}") from error
    if not report.levels or not all(level.measurements for level in report.levels):
        raise UsageError(f"{source} is not a whole perf report: it has no measurements")
    return report


def schema_of(document: Any) -> Any:
    """The schema that a document names; None where it names none."""
    return document.get("schema") if isinstance(document, dict) else None


def _decode(kind: Any, value: Any) -> Any:
    """`value` from JSON as the annotated type `kind`: dataclass, tuple, dict, scalar, or such or None."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        (inner,) = [argument for argument in arguments if argument is not type(None)]
        return None if value is None else _decode(inner, value)
    if is_dataclass(kind) and isinstance(kind, type):
        hints = typing.get_type_hints(kind)
        return kind(**{field.name: _decode(hints[field.name], value[field.name]) for field in fields(kind)})
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return tuple(_decode(arguments[0], item) for item in value)
        return tuple(_decode(inner, item) for inner, item in zip(arguments, value, strict=True))
    if origin is dict:
        return {str(key): _decode(arguments[1], item) for key, item in value.items()}
    if kind is float and type(value) in (int, float):
        return float(value)
    if type(value) is not kind:
        raise TypeError(f"{value!r:.60} is no {kind.__name__}")
    return value
