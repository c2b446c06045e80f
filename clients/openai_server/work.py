"""Work that a request starts: side by side, within a time, and ended when its client goes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response

from clients.openai_server.body import ClientGone
from clients.openai_server.errors import deadline_error
from clients.openai_server.front import Receive, Scope, Send

Result = TypeVar("Result")
Item = TypeVar("Item")


class Work(Response):
    """A response whose making is cancelled, and with it what Triton computes, when its client goes."""

    def __init__(self, work: Callable[[Send], Coroutine[Any, Any, None]], limit_s: float) -> None:
        self._work = work
        self._limit_s = limit_s
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await unless_gone(receive, self._work(send), self._limit_s)


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Result], limit_s: float) -> Result:
    """Runs work to its end, or cancels it when the client closes the connection or too much time has passed.

    Raises:
        ClientGone: the client closed it first.
        ApiError: it took longer than the limit.
    """
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_gone(receive))
    try:
        done, _ = await asyncio.wait({task, watch}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            raise deadline_error(f"the answer was not complete within {limit_s:g} seconds")
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        watch.cancel()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def all_or_none(work: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Runs everything side by side; the first error, or a cancel, ends the others."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def merged(sources: Sequence[AsyncGenerator[Item]]) -> AsyncGenerator[Item]:
    """Yields what any of the sources yields; the first error ends all."""
    if len(sources) == 1:
        async with aclosing(sources[0]) as only:
            async for found in only:
                yield found
        return
    queue: asyncio.Queue[Item | Exception | None] = asyncio.Queue()

    async def pump(source: AsyncGenerator[Item]) -> None:
        try:
            async with aclosing(source) as items:
                async for found in items:
                    queue.put_nowait(found)
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(pump(source)) for source in sources]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
