"""The metadata of a GGUF file: values by key, asked for by type."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt

from compiler.errors import ModelRefused

Value = bool | int | float | str | list[str] | npt.NDArray[Any]
_Default = TypeVar("_Default")


@dataclass(frozen=True)
class Metadata:
    """Values by key. Each method raises ModelRefused where the key is missing without a default, or of another type.

    Attributes:
        shown: how errors name the file.
    """

    shown: str
    values: Mapping[str, Value]

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def refuse(self, key: str, allowed: str) -> NoReturn:
        value = self.values.get(key)
        seen = "is missing" if value is None else f"is {_short(value)}"
        raise ModelRefused(f"{self.shown}: metadata '{key}' {seen}; wanted: {allowed}")

    def integer(
        self, key: str, *, default: _Default | None = None, low: int = 0, high: int = 1 << 31
    ) -> int | _Default:
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if type(value) is not int or not low <= value <= high:
            self.refuse(key, f"an integer from {low} to {high}")
        return value

    def number(self, key: str, *, default: float | None = None) -> float:
        """Returns a finite number above 0."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:  # type: ignore[arg-type,operator]
            self.refuse(key, "a finite number above 0")
        return float(value)  # type: ignore[arg-type]

    def text(self, key: str, *, default: str | None = None) -> str:
        value = self.values.get(key, default)
        if not isinstance(value, str):
            self.refuse(key, "a string")
        return value

    def flag(self, key: str, *, default: bool) -> bool:
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            self.refuse(key, "true or false")
        return value

    def texts(self, key: str) -> list[str]:
        value = self.values.get(key)
        if not isinstance(value, list):
            self.refuse(key, "an array of strings")
        return value

    def numbers(self, key: str, *, length: int) -> npt.NDArray[Any]:
        value = self.values.get(key)
        if not isinstance(value, np.ndarray) or len(value) != length:
            self.refuse(key, f"an array of {length} numbers")
        return value


def _short(value: Value) -> str:
    if isinstance(value, list | np.ndarray):
        return f"an array of {len(value)}"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
