"""How many prompts of one request run at once."""

from __future__ import annotations

import asyncio


class Turns:
    """Lets so many of a request's prompts run at once, and fewer where the engine's queue is full with them.

    A request waits for its own prompts and is not refused for them: it would be each time that it is sent again.
    """

    def __init__(self, at_once: int) -> None:
        self._free = asyncio.Semaphore(at_once)
        self._running = 0
        self._withheld = 0

    async def begin(self) -> None:
        """Waits for a turn."""
        await self._free.acquire()
        self._running += 1

    def fewer(self) -> bool:
        """To be called during a turn: there is one fewer from its end on. False where no other turn is taken."""
        if self._running == 1:
            return False
        self._withheld += 1
        return True

    def end(self) -> None:
        """Ends a turn."""
        self._running -= 1
        if self._withheld:
            self._withheld -= 1
        else:
            self._free.release()
