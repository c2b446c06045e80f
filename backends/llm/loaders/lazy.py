"""A mapping whose values are made when they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeVar

Value = TypeVar("Value")


class LazyMapping(Mapping[str, Value], Generic[Value]):
    """Keys that are known and values that are read at each access, so that nobody holds them but who asked."""

    def __init__(self, readers: Mapping[str, Callable[[], Value]]) -> None:
        self._readers = readers

    def __getitem__(self, key: str) -> Value:
        return self._readers[key]()

    def __contains__(self, key: object) -> bool:
        return key in self._readers

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)
