"""What clients see when a model's process or the server dies under them: an error, never silence, and then service."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Awaitable, Iterator

import pytest

from clients import (
    AsyncGrpcClient,
    AsyncHttpClient,
    GrpcClient,
    HttpClient,
    RetryPolicy,
    ServerError,
    ServerUnavailable,
    StreamBroken,
)
from clients.async_base import AsyncTritonClient
from clients.base import TritonClient
from tests.serving import Served, serve
from tests.triton_models import write_chat_model

FOREVER = {"max_tokens": 100_000}
PATIENT = RetryPolicy(attempts=10, first_s=0.5, longest_s=4, resend=True)  # a restart takes some seconds


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """`compile serve`, which brings back what dies."""
    repository = tmp_path_factory.mktemp("dies")
    write_chat_model(repository)
    with serve(repository) as found:
        yield found


class Readers:
    """Each kind of client reads an endless answer, in a thread of its own; what they end with is kept."""

    def __init__(self, served: Served) -> None:
        self.ends: dict[str, BaseException | None] = {}
        self._begun = threading.Barrier(5)
        for client in (GrpcClient(served.grpc), HttpClient(served.http)):
            self._start(self._read, client)
        for other in (AsyncGrpcClient(served.grpc), AsyncHttpClient(served.http)):
            self._start(self._aread, other)
        self._begun.wait(30)

    def _start(self, read: object, client: TritonClient | AsyncTritonClient) -> None:
        def run() -> None:
            name = type(client).__name__
            self.ends[name] = None
            try:
                found = read(client)  # type: ignore[operator]
                if isinstance(found, Awaitable):
                    asyncio.run(found)  # type: ignore[arg-type]
            except BaseException as error:
                self.ends[name] = error

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        self.threads = [*getattr(self, "threads", []), thread]

    def _read(self, client: TritonClient) -> None:
        with client:
            stream = client.stream("chat", "wait 20", **FOREVER)
            next(stream)
            self._begun.wait(30)
            for _ in stream:
                pass

    async def _aread(self, client: AsyncTritonClient) -> None:
        async with client:
            stream = client.astream("chat", "wait 20", **FOREVER)
            await anext(stream)
            await asyncio.to_thread(self._begun.wait, 30)
            async for _ in stream:
                pass

    def check(self) -> None:
        for thread in self.threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in self.threads), f"silence: {self.ends}"
        assert {name: type(error) for name, error in self.ends.items()} == dict.fromkeys(
            ("GrpcClient", "HttpClient", "AsyncGrpcClient", "AsyncHttpClient"), StreamBroken
        )


def wait_until_it_answers(served: Served) -> None:
    """Asks until the model is back; the number of questions bounds it."""
    with GrpcClient(served.grpc, retries=RetryPolicy(attempts=1)) as client:
        for _ in range(600):
            try:
                assert client.generate("chat", "go", max_tokens=1).text == "w0 "
                return
            except (ServerError, ServerUnavailable):
                threading.Event().wait(0.05)
    raise AssertionError("the model did not come back")


def test_a_models_process_that_dies_breaks_its_streams_off(served: Served) -> None:
    readers = Readers(served)
    with GrpcClient(served.grpc) as client:
        said = []
        with pytest.raises(StreamBroken, match="not ready any more"):
            for chunk in client.stream("chat", "die 2", timeout_s=60):
                said.append(chunk.text)
        assert said == ["w0 ", "w1 "]
        readers.check()
    wait_until_it_answers(served)


def test_a_server_that_is_killed_breaks_streams_off_and_the_same_clients_go_on(served: Served) -> None:
    with GrpcClient(served.grpc, retries=PATIENT) as over_grpc, HttpClient(served.http, retries=PATIENT) as over_http:
        for client in (over_grpc, over_http):
            assert client.generate("chat", "go", max_tokens=1).text == "w0 "
        readers = Readers(served)
        os.kill(served.triton_pid, signal.SIGKILL)
        readers.check()
        for client in (over_grpc, over_http):
            assert client.server_metadata()["name"] == "triton"
        wait_until_it_answers(served)
        for client in (over_grpc, over_http):
            assert client.generate("chat", "go", max_tokens=1).text == "w0 "
