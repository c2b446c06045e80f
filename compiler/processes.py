"""Processes that end with us, and signals that wait while others are ended."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Iterator

_POLL_S = 0.05
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)  # loaded here: between fork and exec nothing may take a lock


def die_with_parent() -> None:
    """Runs in the child: if its parent is killed, the kernel stops it."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def kill_group(group: int) -> None:
    """Kills what is left of a process group, and waits until it is gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except (ProcessLookupError, PermissionError):
            return
        time.sleep(_POLL_S)


@contextlib.contextmanager
def signals_deferred() -> Iterator[None]:
    """Ignores further SIGINT and SIGTERM while something is being stopped (main thread only)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {s: signal.signal(s, signal.SIG_IGN) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
