"""Stages of long work on stderr: a live line on a terminal, one plain line per stage elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from rich.console import Console

# A stage is entered with its name and left when its work is done; `note` adds a line of result.
Stage = Callable[[str], "contextlib.AbstractContextManager[Callable[[str], None]]"]


def terminal_stages(prefix: str, console: Console, total: int) -> Stage:
    """Returns a stage printer for one model; NO_COLOR and pipes are respected by the console."""
    finished = [0]

    @contextlib.contextmanager
    def stage(name: str) -> Iterator[Callable[[str], None]]:
        started = time.monotonic()
        notes: list[str] = []
        finished[0] += 1
        label = f"{prefix}: [{finished[0]}/{total}] {name}"
        spinner = console.status(label) if console.is_terminal else contextlib.nullcontext()
        with spinner:
            yield notes.append
        seconds = time.monotonic() - started
        console.print(f"{label:<52} {seconds:6.1f} s", markup=False, highlight=False)
        for note in notes:
            console.print(f"    {note}", markup=False, highlight=False)

    return stage


@contextlib.contextmanager
def silent_stage(name: str) -> Iterator[Callable[[str], None]]:
    """A stage that prints nothing, for use as a library."""
    yield lambda note: None


def stderr_console() -> Console:
    return Console(file=sys.stderr, soft_wrap=True)
