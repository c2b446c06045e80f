"""Threads that share a step's work without Python: tasks taken from counters, and sleep between steps (a futex).

A phase of a step is a number of tasks. Each thread has its share of them, the same rows or columns in every phase, so
that it finds in its cache what it wrote itself; whoever is ready takes what is left of the others' shares, and goes on
when all are *done*: a thread that the system does not run holds up nobody, unless it is in the midst of a task.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from backends.llm.runners.numba.compiling import inner, outer
from backends.llm.runners.numba.vectors import I32, I64

_SYS_FUTEX, _WAIT, _WAKE, _PRIVATE = 202, 0, 1, 128  # of Linux on x86-64
_SPINS = 2000
_LINE = 8  # int64 in a cache line


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
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return b.call(cgutils.get_or_insert_function(b.module, kind, name), arguments)


def counters_of(phases: int, num_threads: int) -> int:
    """Returns how many counters a step needs: of a phase what is done, and each thread's next task, a line for each."""
    return phases * (1 + num_threads) * _LINE


@inner
def _line(counters, phase, threads, index):  # type: ignore[no-untyped-def]
    return counters.ctypes.data + 8 * _LINE * (phase * (1 + threads) + index)


@inner
def next_task(counters, phase, tasks, thread, threads):  # type: ignore[no-untyped-def]
    """Returns the number of a task that is this thread's now, or -1 when all are taken."""
    for step in range(threads):
        owner = (thread + step) % threads
        first, size = tasks * owner // threads, tasks * (owner + 1) // threads - tasks * owner // threads
        line = _line(counters, phase, threads, 1 + owner)
        if _read(line) < size:
            task = _add(line, 1)
            if task < size:
                return first + task
    return -1


@inner
def task_done(counters, phase, threads):  # type: ignore[no-untyped-def]
    _add(_line(counters, phase, threads, 0), 1)


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
def wait_for_phase(counters, phase, tasks, threads):  # type: ignore[no-untyped-def]
    wait_for(_line(counters, phase, threads, 0), tasks)


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
