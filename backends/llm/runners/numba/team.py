"""The threads of a runner: the one that asks for a step takes part, the others sleep until it does."""

from __future__ import annotations

import os
import threading
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

from backends.llm.runners.memory import zeroed
from backends.llm.runners.numba.step import LEFT, STARTED, STOPPED, take_part
from backends.llm.runners.numba.threads import announce, wait_for
from backends.llm.runners.numba.work import Model, Shape, Step, scratch_of

if TYPE_CHECKING:
    import numpy.typing as npt


class Team:
    """Computes steps with several threads. `begin` before the step's inputs are written, then `compute`.

    The threads end with `close`, or when nobody holds the team any more.
    """

    def __init__(self, shape: Shape, model: Model, step: Step, num_threads: int) -> None:
        self._cells = zeroed(24 * 8).view(np.int64)  # a cache line for each
        self._arguments: tuple[Any, ...] = (shape, model, step)
        self._scratch = scratch_of(shape, 0)
        self._step = step
        self._steps = 0
        self._pid = os.getpid()
        self._compile()
        self._helpers = [
            threading.Thread(
                target=take_part,
                args=(shape, model, step, scratch_of(shape, index), self._cells, True),
                name=f"llm-kernel-{index}",
                daemon=True,
            )
            for index in range(1, num_threads)
        ]
        for helper in self._helpers:
            helper.start()
        self._stop = weakref.finalize(self, _stop, self._cells)

    def begin(self) -> None:
        """Waits until all have left the step before: one that came late reads its numbers still.

        Raises:
            RuntimeError: this is another process, forked from the one that has the threads.
        """
        if os.getpid() != self._pid:
            raise RuntimeError("the threads of a model runner do not survive a fork: load the model in the new process")
        wait_for(_at(self._cells, LEFT), self._steps * len(self._helpers))
        self._step.counters[:] = 0

    def compute(self) -> None:
        """Computes the step whose inputs are in place."""
        self._steps += 1
        announce(_at(self._cells, STARTED))
        take_part(*self._arguments, self._scratch, self._cells, False)

    def close(self) -> None:
        """Ends the threads."""
        self._stop()
        for helper in self._helpers:
            helper.join()

    def _compile(self) -> None:
        """Has the code compiled before anybody waits for a thread that could not: as a helper that is told to stop."""
        self._cells[STARTED], self._cells[STOPPED] = 1, 1
        take_part(*self._arguments, self._scratch, self._cells, True)
        self._cells[:] = 0


def _stop(cells: npt.NDArray[np.int64]) -> None:
    cells[STOPPED] = 1
    announce(_at(cells, STARTED))


def _at(cells: npt.NDArray[np.int64], cell: int) -> int:
    return int(cells.ctypes.data) + 8 * cell
