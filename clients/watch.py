"""Streams that are being waited for. Triton 2.51 never ends those of a model whose process has died, so a client that
hears nothing asks whether the model is still ready (docs/serving_llm.md)."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Iterable
from typing import Protocol

# Silence after which a stream's model is asked for, and how often it is asked again.
SILENT_S = 0.5

Model = tuple[str, str]


class Watched(Protocol):
    """A stream.

    Attributes:
        model: name and version.
        waiting_since: when it began to wait for the response that it waits for now (`time.monotonic`).
    """

    model: Model
    waiting_since: float | None

    def lose(self, reason: str) -> None:
        """Ends it with an error, for whoever reads it."""


class Streams:
    """The open streams of a client, held weakly: one that nobody reads any more is gone."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._streams: weakref.WeakSet[Watched] = weakref.WeakSet()

    def add(self, stream: Watched) -> None:
        with self._lock:
            self._streams.add(stream)

    def remove(self, stream: Watched) -> None:
        with self._lock:
            self._streams.discard(stream)

    def __len__(self) -> int:
        return len(self._streams)

    def silent(self) -> dict[Model, list[Watched]]:
        """Those that have waited for long, by model. Let go of them: whoever holds a stream keeps it open."""
        now = time.monotonic()
        found: dict[Model, list[Watched]] = {}
        with self._lock:
            for stream in self._streams:
                if stream.waiting_since is not None and now - stream.waiting_since >= SILENT_S:
                    found.setdefault(stream.model, []).append(stream)
        return found


def lose_all(streams: Iterable[Watched], model: Model) -> None:
    for stream in streams:
        stream.lose(f"model {model[0]!r} is not ready any more: its process has died, or it was unloaded")


class Watcher:
    """Asks for silent streams' models in a thread of its own, which lives while there are streams.

    Args:
        is_ready: whether a model is ready; raises nothing.
    """

    def __init__(self, is_ready: Callable[[Model], bool]) -> None:
        self.streams = Streams()
        self._is_ready = is_ready
        self._lock = threading.Lock()
        self._running = False
        self._stop = threading.Event()

    def add(self, stream: Watched) -> None:
        self.streams.add(stream)
        with self._lock:
            if not self._running:
                self._running = True
                threading.Thread(target=self._watch, name="client-streams", daemon=True).start()

    def close(self) -> None:
        self._stop.set()

    def _watch(self) -> None:
        while not self._stop.wait(SILENT_S / 2):
            self._look()
            with self._lock:
                if not len(self.streams):
                    self._running = False
                    return

    def _look(self) -> None:
        for model, streams in self.streams.silent().items():
            if not self._is_ready(model):
                lose_all(streams, model)


class AsyncWatcher:
    """The same as a task."""

    def __init__(self, is_ready: Callable[[Model], Awaitable[bool]]) -> None:
        self.streams = Streams()
        self._is_ready = is_ready
        self._task: asyncio.Task[None] | None = None

    def add(self, stream: Watched) -> None:
        self.streams.add(stream)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._watch())

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _watch(self) -> None:
        while len(self.streams):
            await asyncio.sleep(SILENT_S / 2)
            await self._look()

    async def _look(self) -> None:
        for model, streams in self.streams.silent().items():
            if not await self._is_ready(model):
                lose_all(streams, model)
