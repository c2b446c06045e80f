"""Errors of foreign code as ours: of templates and of the library `tokenizers`, which raises bare ones and panics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from compiler.errors import ModelkilnError


@contextmanager
def failing(error_from: Callable[[str], ModelkilnError]) -> Iterator[None]:
    """Turns whatever goes wrong inside into one error, made from the reason in one line."""
    try:
        yield
    except BaseException as error:
        # A panic of Rust code is no Exception; its class cannot be imported.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise error_from(" ".join(str(error).split())[:300] or type(error).__name__) from error
