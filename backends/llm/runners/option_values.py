"""Options of a runner, checked by type: a text or a fraction would fail much later, or quietly mean something else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from backends.llm.plain_values import plain_flag, plain_integer
from compiler.errors import UsageError


def take_integers(options: Any, least: Mapping[str, tuple[int, str]]) -> None:
    """Makes options of a frozen dataclass Python's integers.

    Args:
        least: by the option's name the smallest value, and what is allowed as an error says it.

    Raises:
        UsageError: one is no integer, or smaller.
    """
    for name, (low, allowed) in least.items():
        value = plain_integer(getattr(options, name))
        if value is None or value < low:
            raise UsageError(f"{name} is {getattr(options, name)!r}; allowed: {allowed}")
        object.__setattr__(options, name, value)


def take_flags(options: Any, names: Sequence[str]) -> None:
    """Makes options of a frozen dataclass Python's booleans.

    Raises:
        UsageError: one is no boolean.
    """
    for name in names:
        value = plain_flag(getattr(options, name))
        if value is None:
            raise UsageError(f"{name} is {getattr(options, name)!r}; allowed: true or false")
        object.__setattr__(options, name, value)


def check_paths(options: Any, names: Sequence[str]) -> None:
    """Raises UsageError where an option is no path and not None."""
    for name in names:
        value = getattr(options, name)
        if value is not None and not isinstance(value, str | Path):
            raise UsageError(f"{name} is {value!r}; allowed: the path of a folder")
