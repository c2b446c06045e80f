"""Values as callers give them, made Python's own: numbers of numpy and torch are as good, booleans are no numbers."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np


def plain_integer(value: Any) -> int | None:
    """Returns an integer of any library as Python's; None for what is none."""
    if type(value) is int:
        return value
    if isinstance(value, bool | np.bool_):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def plain_number(value: Any) -> float | None:
    """Returns an integer or a float of any library as Python's; None for what is neither."""
    if type(value) in (int, float):
        return value  # type: ignore[no-any-return]
    return float(value) if isinstance(value, float | np.floating) else plain_integer(value)


def plain_flag(value: Any) -> bool | None:
    """Returns a boolean of any library as Python's; None for what is none."""
    return bool(value) if isinstance(value, bool | np.bool_) else None
