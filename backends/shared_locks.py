"""What becomes of the locks in memory shared with the server when our process is killed while it holds one.

Triton's Python backend shares mutexes between its server and the stub, and they are robust: the kernel marks what a
dead thread holds, and the next owner is told. The server takes that for an exception that nobody catches, and ends with
all its models. Unmarked, the lock stays taken: the server's threads that serve the dead process wait for ever, as they
do in Triton 2.51 whenever a stub dies between two messages, and nothing else is touched.

The kernel finds a dead thread's locks by a list whose head the thread has registered (`set_robust_list`, glibc's own
doing): each entry's lock is `futex_offset` bytes behind it, and at the first that cannot be a lock, one that is not
aligned, the kernel stops. So the offset is made odd. Locking and unlocking never read it.

Copied beside each backend's model.py, since Triton's stub imports from that folder alone.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform

log = logging.getLogger(__name__)

_SYSCALL_NUMBERS = {"x86_64": 274, "aarch64": 100}  # of get_robust_list


class _Head(ctypes.Structure):
    """`struct robust_list_head` of linux/futex.h."""

    _fields_ = (("first", ctypes.c_void_p), ("futex_offset", ctypes.c_long), ("pending", ctypes.c_void_p))


def keep_locks_to_ourselves() -> None:
    """Lets nobody hear of it when a thread of this process dies with a lock.

    It holds for the threads that there are by now, those of Triton's stub among them. Does nothing on systems without
    such lists.
    """
    number = _SYSCALL_NUMBERS.get(platform.machine()) if platform.system() == "Linux" else None
    if number is None:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    for thread in os.listdir("/proc/self/task"):
        head, size = ctypes.POINTER(_Head)(), ctypes.c_size_t()
        if libc.syscall(number, ctypes.c_int(int(thread)), ctypes.byref(head), ctypes.byref(size)) != 0:
            reason = os.strerror(ctypes.get_errno())
            log.warning("get_robust_list: %s; this process may take the server with it when it is killed", reason)
        elif head:
            head.contents.futex_offset |= 1
