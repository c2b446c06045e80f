"""Stages of long work on stderr: a live line on a terminal, one plain line per stage elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

from rich.console import Console


@dataclass
class StageLog:
    """What a running stage tells.

    Attributes:
        notes: lines of result, printed when the stage is done.
        show_step: called with (done, total) while it runs.
        from_cache: set where an earlier build had done the work already.
    """

    show_step: Callable[[int, int], None] = lambda done, total: None
    notes: list[str] = field(default_factory=list)
    from_cache: bool = False

    def note(self, line: str) -> None:
        self.notes.append(line)

    def step(self, done: int, total: int) -> None:
        self.show_step(done, total)


# A stage is entered with its name and left when its work is done.
Stage = Callable[[str], AbstractContextManager[StageLog]]


@dataclass(frozen=True)
class StageTime:
    """How long a stage took, and whether the cache had its result."""

    name: str
    seconds: float
    from_cache: bool


def timed(stage: Stage, times: list[StageTime]) -> Stage:
    """Returns the same stages, which add what they took to `times`."""

    @contextmanager
    def measured(name: str) -> Iterator[StageLog]:
        started = time.monotonic()
        with stage(name) as log:
            yield log
        times.append(StageTime(name, round(time.monotonic() - started, 3), log.from_cache))

    return measured


def terminal_stages(prefix: str, console: Console, total: int) -> Stage:
    """Returns a stage printer for one model; NO_COLOR and pipes are respected by the console."""
    begun = 0

    @contextmanager
    def stage(name: str) -> Iterator[StageLog]:
        nonlocal begun
        begun += 1
        started = time.monotonic()
        label = f"{prefix}: [{begun}/{total}] {name}"
        status = console.status(label) if console.is_terminal else None
        log = StageLog((lambda done, of: status.update(f"{label} {done}/{of}")) if status else StageLog.show_step)
        with status or nullcontext():
            yield log
        cached = "  from the cache" if log.from_cache else ""
        console.print(f"{label:<52} {time.monotonic() - started:6.1f} s{cached}", markup=False, highlight=False)
        for line in log.notes:
            console.print(f"    {line}", markup=False, highlight=False)

    return stage


@contextmanager
def silent_stage(name: str) -> Iterator[StageLog]:
    """A stage that prints nothing, for use as a library."""
    yield StageLog()


def stderr_console() -> Console:
    return Console(file=sys.stderr, soft_wrap=True)
