"""The regions of /dev/shm that Triton's Python stubs map: named after our process, and removed with it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def shared_memory_prefix(pid: int) -> str:
    return f"modelkiln_{pid}_"


def remove_shared_memory(pid: int) -> None:
    """Removes the stubs' regions of the server that process `pid` started; a killed stub leaves them."""
    for path in Path("/dev/shm").glob(f"{shared_memory_prefix(pid)}*"):
        with contextlib.suppress(OSError):
            path.unlink()


def remove_stale_shared_memory() -> None:
    """Removes regions whose owner is gone (a `compile serve` that was killed)."""
    for path in Path("/dev/shm").glob("modelkiln_*"):
        pid = path.name.split("_")[1]
        if pid.isdigit() and int(pid) != os.getpid() and not Path("/proc", pid).exists():
            remove_shared_memory(int(pid))
