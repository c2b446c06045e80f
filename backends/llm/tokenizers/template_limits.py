"""What a chat template may do: steps, seconds, and text that its operations make, one by one and all together.

An operation that can multiply text is checked from its operands before it runs.
"""

from __future__ import annotations

import math
import re
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import Any

import jinja2.compiler
import jinja2.nodes

MAX_LINES = 2_000_000  # executed lines of Python: about a second
MAX_SECONDS = 2.0  # of this thread's own time: a step in C, such as a search, can be long
MAX_TEXT = 16 << 20  # characters of one text
MAX_MADE = 4 * MAX_TEXT  # characters of all texts that were made on the way
_MAX_NUMBER = 1 << 64
# Widths or precisions in formats: of five digits, or given by another value.
_WIDE_PERCENT = re.compile(r"%[^a-zA-Z%]*(\d{5,}|\*)")
_WIDE_BRACES = re.compile(r"\{[^{}]*\d{5,}|\{[^{}]*:[^{}]*\{")
# Filters and methods that take a width or a count, which makes text as long as that.
_WIDTHS = frozenset(["center", "ljust", "rjust", "zfill", "expandtabs", "indent", "batch", "slice", "tojson"])
_MAX_PRECISION = 64


class TooMuch(Exception):
    """A template wants more steps or memory than it may have."""


_left: ContextVar[list[int]] = ContextVar("characters that may still be made")


@contextmanager
def limited() -> Iterator[None]:
    """Raises TooMuch when what runs inside, in this thread, takes too many steps or makes too much text."""
    lines, end = MAX_LINES, time.thread_time() + MAX_SECONDS

    def count(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal lines
        lines -= 1
        if lines < 0:
            raise TooMuch(f"it takes more than {MAX_LINES} steps")
        if time.thread_time() > end:
            raise TooMuch(f"it takes more than {MAX_SECONDS:g} seconds")
        return count

    token, tracer = _left.set([MAX_MADE]), sys.gettrace()
    sys.settrace(count)
    try:
        yield
    finally:
        sys.settrace(tracer)
        _left.reset(token)


def charged(value: Any) -> Any:
    """Returns what an operation made, after counting its length."""
    if isinstance(value, str | list | tuple):
        _charge(len(value))
    return value


def joined(pieces: Iterable[str]) -> str:
    """Returns the pieces put together, if they are not too long."""
    found = list(pieces)
    length = sum(map(len, found))
    _check(length)
    _charge(length)
    return "".join(found)


def _charge(length: int) -> None:
    left = _left.get()
    left[0] -= length
    if left[0] < 0:
        raise TooMuch(f"it makes more than {MAX_MADE} characters of text")


def check_operator(operator: str, left: Any, right: Any) -> None:
    """Refuses an operator whose result would be too long, or a number too large."""
    if operator == "+" and _is_long(left) and _is_long(right):
        _check(len(left) + len(right))
    elif operator == "*" and (_is_long(left) or _is_long(right)):
        _check(_size(left) * _size(right))
    elif operator == "%" and isinstance(left, str):
        if _WIDE_PERCENT.search(left):
            raise TooMuch(f"the format {left[:40]!r} is too wide")
        _check(len(left) + _deep_size(right))
    elif isinstance(left, int) and isinstance(right, int):
        _check_number(operator, left, right)


def _check_number(operator: str, left: int, right: int) -> None:
    if max(abs(left), abs(right)) > _MAX_NUMBER or (operator == "**" and abs(right) > 64):
        raise TooMuch(f"the numbers of '{operator}' are too large")


def check_call(name: str, operands: Iterable[Any]) -> None:
    """Refuses a filter or a method of a text or list that could make something too long.

    Bounds: the two largest operands multiplied, which is what `replace`, `join`, `center`, `indent` and the like can
    come to at most; formats by the widths that they write out.
    """
    values = list(operands)
    if name in ("format", "format_map") and isinstance(values[0], str) and _WIDE_BRACES.search(values[0]):
        raise TooMuch(f"the format {values[0][:40]!r} is too wide")
    if name == "format" and isinstance(values[0], str):  # the filter's formats are those of %
        check_operator("%", values[0], values[1:])
    if name == "round" and any(isinstance(v, int) and abs(v) > _MAX_PRECISION for v in values[1:]):
        raise TooMuch("the precision of 'round' is too large")
    counted = [v for i, v in enumerate(values) if not isinstance(v, int) or (i and name in _WIDTHS)]
    sizes = sorted(map(_size, counted), reverse=True)
    length = math.prod(sizes[:2])
    if length > MAX_MADE:
        raise TooMuch(f"'{name}' could make {length} characters; allowed: {MAX_MADE}")
    if name == "join":
        _check(sum(_deep_size(v) for v in values))


class LimitedCode(jinja2.compiler.CodeGenerator):
    """Code in which what `~` and slices make is counted: the sandbox does not see them."""

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: jinja2.compiler.Frame) -> None:
        self.write("context.environment.charged(")
        super().visit_Concat(node, frame)
        self.write(")")

    def visit_Getitem(self, node: jinja2.nodes.Getitem, frame: jinja2.compiler.Frame) -> None:
        if not isinstance(node.arg, jinja2.nodes.Slice):
            return super().visit_Getitem(node, frame)
        self.write("context.environment.charged(")
        super().visit_Getitem(node, frame)
        self.write(")")


def _check(length: int) -> None:
    if length > MAX_TEXT:
        raise TooMuch(f"an operation could make {length} characters; allowed: {MAX_TEXT}")


def _is_long(value: Any) -> bool:
    return isinstance(value, str | list | tuple)


def _size(value: Any) -> int:
    if isinstance(value, str | list | tuple | dict | range):
        return len(value)
    if isinstance(value, int):
        return abs(value)
    return 1


def _deep_size(value: Any) -> int:
    if isinstance(value, list | tuple):
        return sum(_size(v) for v in value)
    return _size(value)
