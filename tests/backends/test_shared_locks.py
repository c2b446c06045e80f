"""A process that is killed with a lock that it shares: who waits for the lock is told, or nobody is."""

from __future__ import annotations

import ctypes
import errno
import mmap
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import pytest

from backends.shared_locks import keep_locks_to_ourselves

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="robust mutexes of Linux")

_SHARED, _ROBUST = 1, 1  # PTHREAD_PROCESS_SHARED, PTHREAD_MUTEX_ROBUST


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


@contextmanager
def robust_mutex() -> Iterator[ctypes.c_void_p]:
    """A mutex as boost makes it, in memory that forked processes share."""
    libc, memory = ctypes.CDLL(None), mmap.mmap(-1, 4096)
    view = ctypes.c_char.from_buffer(memory)
    mutex, attributes = ctypes.c_void_p(ctypes.addressof(view)), ctypes.create_string_buffer(64)
    libc.pthread_mutexattr_init(attributes)
    assert libc.pthread_mutexattr_setpshared(attributes, _SHARED) == 0
    assert libc.pthread_mutexattr_setrobust(attributes, _ROBUST) == 0
    assert libc.pthread_mutex_init(mutex, attributes) == 0
    yield mutex
    del view
    memory.close()


def _hold(mutex: int, quietly: bool, held: Connection) -> None:
    libc, is_prepared = ctypes.CDLL(None), threading.Event()

    def hold() -> None:
        is_prepared.wait()
        for _ in range(3):
            # Taken and given back before: locking has to go on working.
            assert libc.pthread_mutex_lock(ctypes.c_void_p(mutex)) == 0
            assert libc.pthread_mutex_unlock(ctypes.c_void_p(mutex)) == 0
        assert libc.pthread_mutex_lock(ctypes.c_void_p(mutex)) == 0
        held.send("held")
        threading.Event().wait()

    threading.Thread(target=hold).start()
    if quietly:
        keep_locks_to_ourselves()
    is_prepared.set()


@pytest.mark.parametrize(("quietly", "expected"), [(False, errno.EOWNERDEAD), (True, errno.ETIMEDOUT)])
def test_the_lock_of_a_killed_process(quietly: bool, expected: int) -> None:
    ours, theirs = multiprocessing.Pipe()
    with robust_mutex() as mutex:
        process = multiprocessing.get_context("fork").Process(target=_hold, args=(mutex.value, quietly, theirs))
        process.start()
        assert process.pid is not None
        assert ours.recv() == "held"
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        until = _Time(int(time.time()) + 1, 0)
        assert ctypes.CDLL(None).pthread_mutex_timedlock(mutex, ctypes.byref(until)) == expected
