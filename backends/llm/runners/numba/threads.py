"""Threads that share a step's work without Python: tasks taken from counters, and sleep between steps (a futex).

A phase of a step is a number of tasks. Whoever comes takes the next one, and goes on when all are *done*: a thread that
the system does not run holds up nobody, unless it is in the midst of a task.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from backends.llm.runners.numba.compiling import inner, outer
from backends.llm.runners.numba.vectors import I32, I64

_SYS_FUTEX, _WAIT, _WAKE, _PRIVATE = 202, 0, 1, 128  # of Linux on x86-64
_SPINS = 2000
# Of a phase: a cache line for the next task, one for those that are done.
NEXT, DONE, PHASE_WIDTH = 0, 8, 16


@intrinsic
def _add(context, address, number):  # type: ignore[no-untyped-def]
    def codegen(c: Any, b: ir.IRBuilder, s: Any, a: Any) -> Any:
        return b.atomic_rmw("add", b.inttoptr(a[0], I64.as_pointer()), a[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def _read(context, address):  # type: ignore[no-untyped-def]
    def codegen(c: Any, b: ir.IRBuilder, s: Any, a: Any) -> Any:
        return b.load_atomic(b.inttoptr(a[0], I64.as_pointer()), "seq_cst", 8)

    return types.int64(types.int64), codegen


@intrinsic
def _pause(context):  # type: ignore[no-untyped-def]
    def codegen(c: Any, b: ir.IRBuilder, s: Any, a: Any) -> Any:
        _call(b, "llvm.x86.sse2.pause", ir.VoidType())
        return c.get_dummy_value()

    return types.void(), codegen


@intrinsic
def _give_way(context):  # type: ignore[no-untyped-def]
    def codegen(c: Any, b: ir.IRBuilder, s: Any, a: Any) -> Any:
        _call(b, "sched_yield", I32)
        return c.get_dummy_value()

    return types.void(), codegen


@intrinsic
def _futex(context, address, operation, number):  # type: ignore[no-untyped-def]
    def codegen(c: Any, b: ir.IRBuilder, s: Any, a: Any) -> Any:
        nothing = ir.Constant(I64, 0)
        _call(b, "syscall", I64, ir.Constant(I64, _SYS_FUTEX), a[0], a[1], a[2], nothing, nothing, nothing)
        return c.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


def _call(b: ir.IRBuilder, name: str, result: ir.Type, *arguments: Any) -> Any:
    function = b.module.globals.get(name) or ir.Function(
        b.module, ir.FunctionType(result, [argument.type for argument in arguments]), name
    )
    return b.call(function, arguments)


@inner
def next_task(counters, phase, tasks):  # type: ignore[no-untyped-def]
    """Returns the number of a task that is this thread's now, or -1 when all are taken."""
    task = _add(counters.ctypes.data + 8 * (phase * PHASE_WIDTH + NEXT), 1)
    return task if task < tasks else -1


@inner
def task_done(counters, phase):  # type: ignore[no-untyped-def]
    _add(counters.ctypes.data + 8 * (phase * PHASE_WIDTH + DONE), 1)


@outer
def wait_for(address, least):  # type: ignore[no-untyped-def]
    """Waits until a counter is `least` or more: spinning at first, then giving way to others each time."""
    spins = 0
    while _read(address) < least:
        spins += 1
        if spins < _SPINS:
            _pause()
        else:
            _give_way()


@inner
def wait_for_phase(counters, phase, tasks):  # type: ignore[no-untyped-def]
    wait_for(counters.ctypes.data + 8 * (phase * PHASE_WIDTH + DONE), tasks)


@outer
def announce(address):  # type: ignore[no-untyped-def]
    """Adds one to a counter and wakes all that sleep on it."""
    _add(address, 1)
    _futex(address, _WAKE | _PRIVATE, 1 << 30)


@inner
def sleep_while(address, number):  # type: ignore[no-untyped-def]
    """Sleeps while a counter has this value; its low 32 bits are what the system looks at."""
    while _read(address) == number:
        _futex(address, _WAIT | _PRIVATE, number & 0xFFFFFFFF)


@inner
def add_one(address):  # type: ignore[no-untyped-def]
    _add(address, 1)


@inner
def read(address):  # type: ignore[no-untyped-def]
    return _read(address)
