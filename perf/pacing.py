"""Starts requests when the arrivals say so, in a closed or an open loop. Knows nothing of what a request is."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from perf.arrivals import Arrivals, ClosedLoop, OpenLoop

MAX_OUTSTANDING = 512  # requests in flight in an open loop: beyond it requests are sent late, and counted so
_BACK_OFF_S = 0.01  # after a failed request: a server that refuses at once must not be asked in a spin


class Pacer:
    """One run of a load. `run` ends after `request_count` requests, or soon after `stop`.

    Args:
        attempt: makes one request, due at the nanosecond given (None: now), and returns whether it succeeded. It
            records what happened, and raises nothing.
        arrivals: when to send.
        max_outstanding: requests in flight at most, in an open loop.
    """

    def __init__(
        self,
        attempt: Callable[[int | None], Awaitable[bool]],
        arrivals: Arrivals,
        max_outstanding: int = MAX_OUTSTANDING,
    ) -> None:
        self._attempt = attempt
        self._arrivals = arrivals
        self._max_outstanding = max_outstanding
        self._unsent: float = float("inf")
        self._dispatcher: asyncio.Task[None] | None = None

    async def run(self, request_count: int | None = None) -> None:
        """Send until `stop` or until `request_count` requests were sent; returns when all have ended."""
        self._unsent = float("inf") if request_count is None else request_count
        if isinstance(self._arrivals, ClosedLoop):
            await asyncio.gather(*(self._call_in_turn() for _ in range(self._arrivals.concurrency)))
        else:
            await self._send_on_time(self._arrivals)

    def stop(self) -> None:
        """Send nothing more. Requests in flight are waited for: cancelled, they would burden the next run."""
        self._unsent = 0
        if self._dispatcher is not None:
            self._dispatcher.cancel()

    async def _call_in_turn(self) -> None:
        """One caller of a closed loop."""
        while self._unsent > 0:
            self._unsent -= 1
            if not await self._attempt(None):
                await asyncio.sleep(_BACK_OFF_S)

    async def _send_on_time(self, arrivals: OpenLoop) -> None:
        """The open loop: a task per request, started when it is due."""
        in_flight: set[asyncio.Future[bool]] = set()
        self._dispatcher = asyncio.create_task(self._dispatch(arrivals, in_flight))
        try:
            await asyncio.wait({self._dispatcher})
            if in_flight:
                await asyncio.wait(in_flight)
            if not self._dispatcher.cancelled():
                self._dispatcher.result()
        finally:
            self._dispatcher.cancel()
            for task in in_flight:
                task.cancel()

    async def _dispatch(self, arrivals: OpenLoop, in_flight: set[asyncio.Future[bool]]) -> None:
        slots = asyncio.Semaphore(self._max_outstanding)

        def ended(task: asyncio.Future[bool]) -> None:
            in_flight.discard(task)
            slots.release()

        due_ns = time.perf_counter_ns()
        for gap_s in arrivals.gaps_s():
            if self._unsent <= 0:
                return
            self._unsent -= 1
            # A sleep of zero when late lets answers be read. Arrivals never move: a lag shows as latency.
            await asyncio.sleep(max(0.0, (due_ns - time.perf_counter_ns()) / 1e9))
            await slots.acquire()
            task = asyncio.ensure_future(self._attempt(due_ns))
            in_flight.add(task)
            task.add_done_callback(ended)
            due_ns += round(gap_s * 1e9)
