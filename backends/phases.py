"""How long the start of a model takes, phase by phase: lines of the server's log, which `compile serve` adds up.

Copied beside each backend's model.py, since Triton's stub imports from that folder alone.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_STARTED = 19  # of /proc/self/stat, counted behind the process's name: ticks after the machine's start


def report_process(model: str) -> None:
    """Reports how long this process has lived: its start and the imports."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[_STARTED])
    except OSError:
        return
    report(model, "process", time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))


@contextmanager
def phase(model: str, name: str) -> Iterator[None]:
    """Reports how long the block took."""
    started = time.monotonic()
    yield
    report(model, name, time.monotonic() - started)


def report(model: str, name: str, seconds: float) -> None:
    """Writes one phase's line."""
    print(f"modelkiln model={model} phase={name} seconds={seconds:.3f}", flush=True)
