"""What becomes of the locks in memory shared with the server when our process is killed while it holds one.

Triton's Python backend shares mutexes between its server and the stub, and they are robust: the kernel tells the next
owner that the last one has died. The server takes that for an exception that nobody catches, and ends with all its
models. Where the kernel tells nobody, the lock stays taken: the threads that serve the dead process wait for ever, as
they do in Triton 2.51 whenever a stub dies between two messages, and nothing else is touched.

The kernel knows which locks a thread holds from a list whose head each thread registers (`set_robust_list`, of glibc's
own doing). So each thread of ours that talks to the server registers an empty one. The lists that glibc keeps, and with
them locking and unlocking, stay as they are.

Copied beside each backend's model.py, since Triton's stub imports from that folder alone.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform

log = logging.getLogger(__name__)

_SYSCALL_NUMBERS = {"x86_64": 273, "aarch64": 99}  # of set_robust_list


class _Head(ctypes.Structure):
    """`struct robust_list_head` of linux/futex.h."""

    _fields_ = (("first", ctypes.c_void_p), ("futex_offset", ctypes.c_long), ("pending", ctypes.c_void_p))


# An empty list is one whose head comes after its head. It has to outlive the threads.
_EMPTY = _Head()
_EMPTY.first = ctypes.addressof(_EMPTY)


def keep_locks_to_ourselves() -> None:
    """Lets nobody hear of it when the calling thread dies with a lock. Does nothing on systems without such a list."""
    number = _SYSCALL_NUMBERS.get(platform.machine()) if platform.system() == "Linux" else None
    if number is None:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(number, ctypes.byref(_EMPTY), ctypes.c_size_t(ctypes.sizeof(_EMPTY))) != 0:
        log.warning(
            "set_robust_list: %s; a killed process may take the server with it", os.strerror(ctypes.get_errno())
        )
