"""Errors as GitHub's workflow commands, which it shows beside the line of a file in a pull request. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from compiler.errors import ModelkilnError

# GitHub shows ten of each level for a step, and drops the rest.
MAX_SHOWN = 10
_LOCATED = re.compile(r"([^:\n]+):(\d+): ")
_PYTHON_LINE = re.compile(r"([\w-]+\.py):(\d+)\b")


@dataclass(frozen=True)
class Annotation:
    """One remark.

    Attributes:
        level: `error`, `warning` or `notice`.
        file: where it stands, or None.
        line: counted from 1, or None.
    """

    level: str
    title: str
    message: str
    file: Path | None = None
    line: int | None = None


def workflow_command(annotation: Annotation, root: Path) -> str:
    """Returns `::error file=...,line=...,title=...::message` on one line.

    Args:
        annotation: what to say.
        root: the repository's folder; files in it are named relative to it, as GitHub wants them.
    """
    properties = {
        "file": _relative(annotation.file, root) if annotation.file else "",
        "line": str(annotation.line) if annotation.file and annotation.line else "",
        "title": annotation.title,
    }
    text = ",".join(f"{key}={_escaped_property(value)}" for key, value in properties.items() if value)
    return f"::{annotation.level} {text}::{_escaped(annotation.message)}"


def annotation_from_error(error: ModelkilnError, spec: Path | None) -> Annotation:
    """Returns where an error belongs: the line it starts with, else a line of the user's code, else the spec.

    Args:
        error: its message may start with `file:line:`, or name lines of Python files by their base name.
        spec: what was being built; the Python files are looked for beside it.
    """
    title = f"modelkiln: {error.kind}"
    text = str(error)
    located = _LOCATED.match(text)
    if located and Path(located[1]).is_file():
        return Annotation("error", title, text[located.end() :], Path(located[1]), int(located[2]))
    for name, line in reversed(_PYTHON_LINE.findall(error.message)):
        if spec and (spec.parent / name).is_file():
            return Annotation("error", title, text, spec.parent / name, int(line))
    return Annotation("error", title, text, spec)


def _relative(path: Path, root: Path) -> str:
    resolved, base = path.resolve(), root.resolve()
    return str(resolved.relative_to(base)) if resolved.is_relative_to(base) else str(path)


def _escaped(text: str) -> str:
    """Escapes as the runner's own toolkit does: `%` first."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _escaped_property(text: str) -> str:
    return _escaped(text).replace(":", "%3A").replace(",", "%2C")
