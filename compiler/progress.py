"""Stages of long work on stderr: a live line on a terminal, one plain line per stage elsewhere."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text


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

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def timed(stage: Stage, times: list[StageTime]) -> Stage:
    """Returns the same stages, which add what they took to `times`."""

    @contextmanager
    def measured(name: str) -> Iterator[StageLog]:
        started = time.monotonic()
        with stage(name) as log:
            yield log
        times.append(StageTime(name, round(time.monotonic() - started, 3), log.from_cache))

    return measured


@dataclass(frozen=True)
class Moment:
    """Where a stage stands.

    Attributes:
        elapsed: its seconds so far; stepped_at: those at which the last of `done` of `of` steps was done.
    """

    stage: str
    elapsed: float
    done: int = 0
    of: int = 0
    stepped_at: float = 0.0


@dataclass(frozen=True)
class Estimate:
    """How far a build is and how long it still takes, from what its stages took before. Pure.

    Attributes:
        expected: seconds by stage of an earlier build; empty where there was none.
        total: how many stages there are.
    """

    expected: Mapping[str, float]
    total: int

    def seconds_left(self, finished: Collection[str], now: Moment) -> float | None:
        """Returns the seconds to the end of the build after the stages before, or None where nothing tells them."""
        past = self.expected.get(now.stage, 0.0) - now.elapsed
        if past > 0:
            current = past
        elif now.done:
            # By the steps so far, counted down from the last of them: they are not of one size.
            per_step = now.stepped_at / now.done
            current = max(0.0, per_step * (now.of - now.done) - (now.elapsed - now.stepped_at))
        else:
            return None  # never seen, or slower than it was
        later = (seconds for name, seconds in self.expected.items() if name not in finished and name != now.stage)
        return current + sum(later)

    def fraction(self, finished: Collection[str], now: Moment) -> float:
        """Returns the part of the build that is done, 0 to 1: by time where it is known, else by stages and steps."""
        if now.stage not in self.expected:
            return min(1.0, (len(finished) + (now.done / now.of if now.of else 0.0)) / self.total)
        past = sum(seconds for name, seconds in self.expected.items() if name in finished)
        done = past + min(now.elapsed, self.expected[now.stage])
        return min(1.0, done / max(sum(self.expected.values()), 1e-9))


def expected_seconds(manifests: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Returns what each stage took when it last ran itself; the manifests come the newest first."""
    expected: dict[str, float] = {}
    for manifest in manifests:
        for stage in manifest.get("stages") or ():
            if not stage["from_cache"]:
                expected.setdefault(stage["name"], stage["seconds"])
    return expected


def is_live(console: Console) -> bool:
    """Whether to show what moves: on a terminal, unless NO_COLOR asks for plain text."""
    return console.is_terminal and not console.is_dumb_terminal and not os.environ.get("NO_COLOR")


def terminal_stages(prefix: str, console: Console, total: int, expected: Mapping[str, float] | None = None) -> Stage:
    """Returns a stage printer for one model: a bar while a stage runs on a terminal, then a plain line anywhere."""
    finished: list[str] = []
    estimate = Estimate(expected or {}, total)

    @contextmanager
    def stage(name: str) -> Iterator[StageLog]:
        started = time.monotonic()
        label = f"{prefix}: [{len(finished) + 1}/{total}] {name}"
        log = StageLog()
        with _bar(console, label, estimate, finished, name, log) if is_live(console) else nullcontext():
            yield log
        finished.append(name)
        cached = "  from the cache" if log.from_cache else ""
        console.print(f"{label:<52} {time.monotonic() - started:6.1f} s{cached}", markup=False, highlight=False)
        for line in log.notes:
            console.print(f"    {line}", markup=False, highlight=False)

    return stage


def _bar(
    console: Console, label: str, estimate: Estimate, finished: list[str], name: str, log: StageLog
) -> AbstractContextManager[Any]:
    """Returns the line of a stage: its name, its steps, the part of the build that is done, the time left."""
    started = time.monotonic()
    last = Moment(name, 0.0)

    def show_step(done: int, of: int) -> None:
        nonlocal last
        elapsed = time.monotonic() - started
        last = Moment(name, elapsed, done, of, elapsed)

    def render() -> Table:
        now = replace(last, elapsed=time.monotonic() - started)
        counted = f" {now.done}/{now.of}" if now.of else ""
        bar = ProgressBar(1.0, estimate.fraction(finished, now), width=24)
        line = Table.grid(padding=(0, 1))
        line.add_row(Text(label + counted), bar, Text(_shown(estimate.seconds_left(finished, now))))
        return line

    log.show_step = show_step
    return moving_line(console, render)


def moving_line(console: Console, render: Callable[[], RenderableType]) -> Live:
    """Returns a context that draws a line anew ten times a second and takes it away at its end.

    stdout stays what it is: it may be a pipe, and the line is on stderr.
    """
    return Live(
        console=console,
        get_renderable=render,
        refresh_per_second=10,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )


def _shown(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{round(seconds) // 60}:{round(seconds) % 60:02} left"


@contextmanager
def silent_stage(name: str) -> Iterator[StageLog]:
    """A stage that prints nothing, for use as a library."""
    yield StageLog()


def stderr_console() -> Console:
    return Console(file=sys.stderr, soft_wrap=True)
