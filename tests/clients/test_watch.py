"""Which streams are looked at, and what an answer about their model means."""

from __future__ import annotations

import asyncio
import socket
import threading
import time

from clients import AsyncGrpcClient, AsyncHttpClient, GrpcClient, HttpClient
from clients.watch import SILENT_S, AsyncWatcher, Model, Streams, Watcher
from tests.triton_models import TritonAddress


class FakeStream:
    """A stream that has waited for `waited_s`, or does not wait."""

    def __init__(self, model: str, waited_s: float | None) -> None:
        self.model: Model = (model, "")
        self.waiting_since = None if waited_s is None else time.monotonic() - waited_s
        self.lost = threading.Event()
        self.reason = ""

    def lose(self, reason: str) -> None:
        self.reason = reason
        self.lost.set()


def test_only_those_that_wait_for_long_are_silent() -> None:
    streams = Streams()
    long, short, none = FakeStream("a", SILENT_S + 1), FakeStream("a", -60), FakeStream("b", None)
    for stream in (long, short, none):
        streams.add(stream)
    assert streams.silent() == {("a", ""): [long]}
    streams.remove(long)
    assert streams.silent() == {} and len(streams) == 2


def test_a_stream_that_nobody_holds_is_gone() -> None:
    streams = Streams()
    streams.add(FakeStream("a", 9))
    assert len(streams) == 0


def test_streams_of_a_model_that_is_not_ready_are_lost_and_no_others() -> None:
    asked: list[Model] = []

    def is_ready(model: Model) -> bool:
        asked.append(model)
        return model[0] != "dead"

    watcher = Watcher(is_ready)
    dead, alive = FakeStream("dead", 9), FakeStream("alive", 9)
    for stream in (alive, dead):
        watcher.add(stream)
    assert dead.lost.wait(30) and "'dead' is not ready any more" in dead.reason
    assert not alive.lost.is_set() and ("alive", "") in asked
    watcher.close()


def test_for_asyncio_the_same_and_the_task_ends_with_the_last_stream() -> None:
    async def is_ready(model: Model) -> bool:
        return model[0] != "dead"

    async def test() -> None:
        watcher = AsyncWatcher(is_ready)
        dead, alive = FakeStream("dead", 9), FakeStream("alive", 9)
        for stream in (alive, dead):
            watcher.add(stream)
        while not dead.lost.is_set():
            await asyncio.sleep(0.01)
        assert not alive.lost.is_set()
        for stream in (alive, dead):
            watcher.streams.remove(stream)
        assert watcher._task is not None
        await watcher._task

    asyncio.run(asyncio.wait_for(test(), 30))


def test_only_the_servers_own_no_counts(triton: TritonAddress) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()  # connections are made, and nothing is ever answered
        nobody = f"127.0.0.1:{silent.getsockname()[1]}"
        for client_type, address in ((GrpcClient, triton.grpc_url), (HttpClient, triton.http_url)):
            with client_type(address) as client:
                assert client._may_serve(("chat", "")) and not client._may_serve(("unknown", ""))
            with client_type(nobody, timeout_s=0.1) as client:
                assert client._may_serve(("chat", ""))

        async def test() -> None:
            for client_type, address in ((AsyncGrpcClient, triton.grpc_url), (AsyncHttpClient, triton.http_url)):
                async with client_type(address) as client:
                    assert await client._may_serve(("chat", "")) and not await client._may_serve(("unknown", ""))
                async with client_type(nobody, timeout_s=0.1) as client:
                    assert await client._may_serve(("chat", ""))

        asyncio.run(test())
