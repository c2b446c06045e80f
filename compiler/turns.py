"""Stages of builds that run side by side: what is timed waits until it runs alone, and the others wait for it."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from compiler.progress import Stage, StageLog

COMPARE, SERVE = "compare the candidates", "serve the candidates"
TIMED_STAGES = (COMPARE, SERVE)


def in_turns(stage: Stage, lock_file: Path) -> Stage:
    """Returns the same stages; each holds the lock that all builds share, a timed one for itself."""

    @contextmanager
    def turn(name: str) -> Iterator[StageLog]:
        with lock_file.open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX if name in TIMED_STAGES else fcntl.LOCK_SH)
            with stage(name) as log:
                yield log

    return turn
