"""Tool calls in a model's text: found, parsed and taken out, however the text is cut into pieces. Pure.

Hermes models (Qwen's among them) write <tool_call>{"name": ..., "arguments": {...}}</tool_call>. What looks like a call
and is none stays text: nothing that the model wrote is lost.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

HERMES_START, HERMES_END = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class CallDelta:
    """A part of a call: the first has its id and name, later ones only more of the arguments' JSON."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None

    def to_json(self) -> dict[str, Any]:
        if self.id is None:
            return {"index": self.index, "function": {"arguments": self.arguments}}
        function = {"name": self.name, "arguments": self.arguments}
        return {"index": self.index, "id": self.id, "type": "function", "function": function}


Part = str | CallDelta


class ToolParser(Protocol):
    """Takes an answer's text in pieces; gives text and calls.

    Attributes:
        finish_reason: of an answer that ended by itself with calls.
    """

    finish_reason: str

    def push(self, text: str) -> Sequence[Part]: ...

    def finish(self) -> Sequence[Part]: ...


class HermesParser:
    """Finds calls between tags.

    Args:
        names: of the functions that there are; a call of another one is text.
        new_id: makes the id of a call.
        single: the client takes one call at most; further ones are left out.
    """

    finish_reason = "tool_calls"

    def __init__(self, names: Collection[str], new_id: Callable[[], str], *, single: bool = False) -> None:
        self._names = names
        self._new_id = new_id
        self._single = single
        self._held = ""  # what may become a tag, with the white space before it; or what a call has so far
        self._inside = False
        self._num_calls = 0

    def push(self, text: str) -> Sequence[Part]:
        """Returns what can leave now; text that may belong to a tag is held back."""
        self._held += text
        parts: list[Part] = []
        while self._step(parts):
            pass
        return parts

    def finish(self) -> Sequence[Part]:
        """Returns the rest. Models often end without the closing tag."""
        held, self._held = self._held, ""
        if self._inside:
            return self._called(held, HERMES_START + held)
        return [held] if held and not (self._num_calls and held.isspace()) else []

    def _step(self, parts: list[Part]) -> bool:
        """Takes the next text or call from what is held; returns whether there may be more."""
        end = self._held.find(HERMES_END if self._inside else HERMES_START)
        if self._inside:
            if end < 0:
                return False
            inner, self._held = self._held[:end], self._held[end + len(HERMES_END) :]
            parts += self._called(inner, HERMES_START + inner + HERMES_END)
            self._inside = False
            return True
        if end < 0:
            leaving = len(self._held) - _held_back(self._held)
            text, self._held = self._held[:leaving], self._held[leaving:]
        else:
            text, self._held = self._held[:end].rstrip(), self._held[end + len(HERMES_START) :]
            self._inside = True
        if text:
            parts.append(text)
        return self._inside

    def _called(self, inner: str, written: str) -> Sequence[Part]:
        """Returns the call that stands between tags, or all that was written where it is none."""
        found = _call_from_text(inner)
        if found is None or found[0] not in self._names:
            return [written]
        if self._single and self._num_calls:
            return []
        self._num_calls += 1
        return [CallDelta(self._num_calls - 1, found[1], self._new_id(), found[0])]


class NamedParser:
    """The whole text is the arguments of one function, which the request named and a grammar saw to."""

    finish_reason = "stop"  # as the OpenAI API has it where the request forced the function

    def __init__(self, name: str, new_id: Callable[[], str]) -> None:
        self._name: str | None = name
        self._id: str | None = new_id()

    def push(self, text: str) -> Sequence[Part]:
        if not text:
            return []
        part = CallDelta(0, text, self._id, self._name)
        self._id = self._name = None
        return [part]

    def finish(self) -> Sequence[Part]:
        return []


class RequiredParser:
    """The whole text is one call as JSON, which a grammar saw to; it is cut where the answer was."""

    finish_reason = "tool_calls"

    def __init__(self, new_id: Callable[[], str]) -> None:
        self._text = ""
        self._new_id = new_id

    def push(self, text: str) -> Sequence[Part]:
        self._text += text
        return []

    def finish(self) -> Sequence[Part]:
        found = _call_from_text(self._text)
        if found is not None:
            return [CallDelta(0, found[1], self._new_id(), found[0])]
        return [self._text] if self._text else []


def _call_from_text(text: str) -> tuple[str, str] | None:
    """Returns name and arguments of a call, these as JSON that every client can read; None where it is none."""
    try:
        found = json.loads(text, parse_constant=_refuse_constant)
        if not isinstance(found, dict) or not isinstance(found.get("name"), str):
            return None
        arguments = found.get("arguments", {})
        written = json.dumps(arguments, ensure_ascii=False)
        if not _is_unicode(written):
            written = json.dumps(arguments)  # half of a surrogate pair, which no text can hold, stays an escape
    except (ValueError, RecursionError):
        return None
    return (found["name"], written) if isinstance(arguments, dict) else None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _held_back(text: str) -> int:
    """Returns how many characters at the end may yet be the start of a tag, with the white space before it."""
    tag = max((n for n in range(1, len(HERMES_START)) if text.endswith(HERMES_START[:n])), default=0)
    before = text[: len(text) - tag]
    return tag + len(before) - len(before.rstrip())
