"""Sends a workload to a server in a closed or an open loop and records what happened to each request.

Owns the event loop; when to send is the `Pacer`'s. Knows nothing of models, statistics or reports.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import selectors
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from clients.core import address_from_url
from clients.errors import InputError
from perf.arrivals import Arrivals, ClosedLoop, OpenLoop
from perf.errors import RequestFailed, UsageError
from perf.grpc_sender import GrpcSender
from perf.http_sender import HttpSender
from perf.pacing import MAX_OUTSTANDING, Pacer
from perf.records import OK, RecordBuffer, Records
from perf.workload import Workload

PROTOCOLS = ("grpc", "http")
_MOST_SELECTABLE = 900  # select() takes descriptors below 1024

Result = TypeVar("Result")


@dataclass(frozen=True)
class Target:
    """Where requests go.

    Attributes:
        address: `host:port`.
        protocol: "grpc" or "http".
        timeout_s: seconds that one request may take; then it is counted as a timeout.
    """

    address: str
    protocol: str
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if self.protocol not in PROTOCOLS:
            raise UsageError(f"protocol is {self.protocol!r}; allowed: {', '.join(PROTOCOLS)}")
        if read_address(self.address) != self.address:
            raise UsageError(f"address is {self.address!r}; it must be host:port, as in 127.0.0.1:8001")


def read_address(url: str) -> str:
    """`host:port` of what a user writes, which may be what `compile serve` prints; raises `UsageError`."""
    try:
        return address_from_url(url)
    except InputError as error:
        raise UsageError(str(error)) from error


class Sender(Protocol):
    """Carries one payload to the server and waits for the end of its answer."""

    async def open(self, connections: int) -> None: ...

    async def send(self, payload: bytes) -> object: ...

    async def close(self) -> None: ...


class LoadGenerator:
    """One run of a load, recorded. `run` and `stop` are the `Pacer`'s.

    Args:
        sender: an open sender.
        payloads: sent in turn, from the first again after the last.
        arrivals: when to send.
        max_outstanding: requests in flight at most, in an open loop.
    """

    def __init__(
        self,
        sender: Sender,
        payloads: tuple[bytes, ...],
        arrivals: Arrivals,
        max_outstanding: int = MAX_OUTSTANDING,
    ) -> None:
        self.records = RecordBuffer()
        self._sender = sender
        self._next_payload = itertools.cycle(payloads).__next__
        pacer = Pacer(self._attempt, arrivals, max_outstanding)
        self.run, self.stop = pacer.run, pacer.stop

    async def _attempt(self, due_ns: int | None) -> bool:
        """Send one request, due at `due_ns` or else now, and record it."""
        code = OK
        sent_ns = time.perf_counter_ns()
        try:
            await self._sender.send(self._next_payload())
        except RequestFailed as error:
            code = self.records.error_code(error.kind, error.message)
        intended_ns = sent_ns if due_ns is None else due_ns
        self.records.add(intended_ns, sent_ns, time.perf_counter_ns(), code)
        return code == OK


def make_sender(target: Target) -> Sender:
    """The sender for the target's protocol, not yet open."""
    if target.protocol == "grpc":
        return GrpcSender(target.address, target.timeout_s)
    return HttpSender(target.address, target.timeout_s)


def connections_for(arrivals: Arrivals) -> int:
    """Connections to open before the first request, over HTTP."""
    return arrivals.concurrency if isinstance(arrivals, ClosedLoop) else 8


def run_event_loop(main: Callable[[], Coroutine[Any, Any, Result]], connections: int = 0) -> Result:
    """Run `main` on a loop that is fit for measuring, and leave no task behind.

    epoll rounds a timer up to the next millisecond, which an open loop would add to every latency; select()
    takes microseconds. Objects from before the run are set aside, so that no collection walks through them.
    """
    selector = selectors.SelectSelector() if connections < _MOST_SELECTABLE else selectors.DefaultSelector()
    loop = asyncio.SelectorEventLoop(selector)
    gc.collect()
    gc.freeze()
    try:
        return loop.run_until_complete(main())
    finally:
        gc.unfreeze()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


def run_closed(
    target: Target,
    workload: Workload,
    concurrency: int,
    *,
    warmup_requests: int = 0,
    duration_s: float | None = None,
    request_count: int | None = None,
) -> Records:
    """Closed loop: `concurrency` callers, for `duration_s` seconds or `request_count` requests. Blocks.

    Returns:
        The requests that ended within the measurement. With `request_count` it lasts from the first request
        to the end of the last one, and holds all of them.
    """
    return _run(target, workload, ClosedLoop(concurrency), warmup_requests, duration_s, request_count)


def run_open(
    target: Target,
    workload: Workload,
    arrivals: OpenLoop,
    *,
    warmup_requests: int = 0,
    duration_s: float | None = None,
    request_count: int | None = None,
    max_outstanding: int = MAX_OUTSTANDING,
) -> Records:
    """Open loop: requests when `arrivals` says, latency counted from then. Otherwise as `run_closed`."""
    return _run(target, workload, arrivals, warmup_requests, duration_s, request_count, max_outstanding)


def _run(
    target: Target,
    workload: Workload,
    arrivals: Arrivals,
    warmup_requests: int,
    duration_s: float | None,
    request_count: int | None,
    max_outstanding: int = MAX_OUTSTANDING,
) -> Records:
    if (duration_s is None) == (request_count is None):
        raise UsageError("give either duration_s or request_count")

    async def main() -> Records:
        sender = make_sender(target)
        await sender.open(connections_for(arrivals))
        try:
            await warm_up(sender, workload, arrivals, warmup_requests)
            generator = LoadGenerator(sender, workload.payloads, arrivals, max_outstanding)
            start_ns = time.perf_counter_ns()
            running = asyncio.create_task(generator.run(request_count))
            if duration_s is not None:
                await asyncio.wait({running}, timeout=duration_s)
                end_ns = time.perf_counter_ns()
                generator.stop()
            await running
            if duration_s is None:
                end_ns = time.perf_counter_ns() + 1  # a window ends before its border: the last request is inside
            return generator.records.freeze(arrivals.mode, start_ns, end_ns).window(start_ns, end_ns)
        finally:
            await sender.close()

    return run_event_loop(main, connections_for(arrivals))


async def warm_up(sender: Sender, workload: Workload, arrivals: Arrivals, requests: int) -> None:
    """Send `requests` requests as the measurement will, and forget them."""
    if requests:
        await LoadGenerator(sender, workload.payloads, arrivals).run(requests)
