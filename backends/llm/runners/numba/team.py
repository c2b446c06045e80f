"""The threads of a runner: the one that asks for a step takes part, the others sleep until it does."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from backends.llm.runners.cache_memory import zeroed
from backends.llm.runners.numba.step import LEFT, STARTED, STOPPED, take_part
from backends.llm.runners.numba.threads import announce, wait_for
from backends.llm.runners.numba.work import Model, Shape, Step, scratch_of


class Team:
    """Computes steps with several threads. `begin` before the step's inputs are written, then `compute`."""

    def __init__(self, shape: Shape, model: Model, step: Step, num_threads: int) -> None:
        self._cells = zeroed(24 * 8).view(np.int64)  # a cache line for each
        self._arguments: tuple[Any, ...] = (shape, model, step)
        self._scratch = scratch_of(shape, 0)
        self._step = step
        self._steps = 0
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

    def _compile(self) -> None:
        """Has the code compiled before anybody waits for a thread that could not: a helper that is told to stop."""
        self._cells[STARTED], self._cells[STOPPED] = 1, 1
        take_part(*self._arguments, self._scratch, self._cells, True)
        self._cells[:] = 0

    def begin(self) -> None:
        """Waits until all have left the step before: one that came late reads its numbers still."""
        wait_for(self._at(LEFT), self._steps * len(self._helpers))
        self._step.counters[:] = 0

    def compute(self) -> None:
        """Computes the step whose inputs are in place."""
        self._steps += 1
        announce(self._at(STARTED))
        take_part(*self._arguments, self._scratch, self._cells, False)

    def close(self) -> None:
        """Ends the threads."""
        self._cells[STOPPED] = 1
        announce(self._at(STARTED))
        for helper in self._helpers:
            helper.join()
        self._helpers = []

    def _at(self, cell: int) -> int:
        return int(self._cells.ctypes.data) + 8 * cell
