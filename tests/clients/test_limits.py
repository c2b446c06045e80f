"""Addresses and time limits that make no sense are refused at once; those that do hold for the whole call."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from clients import (
    AsyncGrpcClient,
    AsyncHttpClient,
    DeadlineExceeded,
    GrpcClient,
    HttpClient,
    InputError,
)
from clients.core import ClientCore
from clients.retries import Attempts, RetryBudget, RetryPolicy
from tests.clients.test_clients_on_triton import CLIENTS
from tests.triton_models import TritonAddress

TYPES = (GrpcClient, HttpClient, AsyncGrpcClient, AsyncHttpClient)
OWN_LIMIT_S = 30.0
INPUTS = {"INPUT0": [[1, 2, 3, 4]]}


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("127.0.0.1:8001", "127.0.0.1:8001"),
        ("http://triton.example:8000/", "triton.example:8000"),
        ("HTTP://127.0.0.1:1", "127.0.0.1:1"),
        ("grpc://[::1]:65535", "[::1]:65535"),
    ],
)
def test_what_an_address_may_be(url: str, address: str) -> None:
    assert ClientCore(url).url == address


@pytest.mark.parametrize("client_type", TYPES)
@pytest.mark.parametrize(
    "url",
    [
        *("", "http://", "localhost", "127.0.0.1:", ":8000", "127.0.0.1:x", "127.0.0.1:0", "127.0.0.1:65536", "::1"),
        *("127.0.0.1:8000/v2", "127.0.0.1:8000?a=b", "me:secret@127.0.0.1:8000", " 127.0.0.1:8000", "https://a:443"),
    ],
)
def test_an_address_that_is_none_is_refused_when_the_client_is_made(client_type: type[Any], url: str) -> None:
    with pytest.raises(InputError, match="the address"):
        client_type(url)


@pytest.mark.parametrize("timeout_s", [0, -1.0, math.inf, math.nan, None, "2"])
def test_a_client_needs_a_time_limit(timeout_s: Any) -> None:
    with pytest.raises(InputError, match=r"not allowed; give seconds"):
        ClientCore("a:1", timeout_s=timeout_s)


@pytest.mark.parametrize("protocol", CLIENTS)
def test_a_time_limit_that_is_over_sends_nothing(protocol: str, triton: TritonAddress) -> None:
    """0 is no limit to aiohttp, and a socket that does not wait to Python: neither is what was asked for."""
    with CLIENTS[protocol](triton.grpc_url if "grpc" in protocol else triton.http_url) as client:
        before = client.statistics("echo")
        for timeout_s in (0, -0.5):
            with pytest.raises(DeadlineExceeded, match="nothing was sent"):
                client.infer("echo", INPUTS, timeout_s=timeout_s)
            with pytest.raises(DeadlineExceeded, match="nothing was sent"):
                client.generate("chat", "Hi", timeout_s=timeout_s)
        for timeout_s in (math.inf, math.nan, 1e12):
            with pytest.raises(InputError, match="a year"):
                client.infer("echo", INPUTS, timeout_s=timeout_s)
        assert client.statistics("echo") == before


def test_no_attempt_begins_after_the_time_limit() -> None:
    now = [0.0]
    attempts = Attempts(RetryPolicy(), RetryBudget(), 2.0, repeatable=True, clock=lambda: now[0])
    assert attempts.next_s() == 2.0
    now[0] = 2.0
    with pytest.raises(DeadlineExceeded, match="before the request was sent"):
        attempts.next_s()


@contextmanager
def silent_server() -> Iterator[str]:
    """It takes connections and never says a word, as a process does that was stopped."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        kept: list[socket.socket] = []

        def accept() -> None:
            while True:
                try:
                    kept.append(listening.accept()[0])
                except OSError:
                    return

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield f"127.0.0.1:{listening.getsockname()[1]}"
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()
            for one in kept:
                one.close()


@pytest.mark.parametrize("protocol", CLIENTS)
def test_the_limit_of_a_call_holds_for_the_question_about_the_model_too(protocol: str) -> None:
    with silent_server() as address, CLIENTS[protocol](address, timeout_s=OWN_LIMIT_S) as client:
        start = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            client.infer("echo", INPUTS, timeout_s=0.1)
        with pytest.raises(DeadlineExceeded):
            client.generate("chat", "Hi", timeout_s=0.1)
        assert time.monotonic() - start < OWN_LIMIT_S  # the client's own, which one question alone would have taken


@contextmanager
def dripping_server(pieces: int) -> Iterator[str]:
    """It answers everything with `pieces` bytes, one after the other."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer(inside: socket.socket) -> None:
            with inside, contextlib.suppress(OSError):
                inside.recv(65536)
                inside.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % pieces)
                for _ in range(pieces):
                    inside.sendall(b" ")
                    time.sleep(0.01)  # it is what it is about: slower than the limit, and never silent for long

        def accept() -> None:
            while True:
                try:
                    inside = listening.accept()[0]
                except OSError:
                    return
                threading.Thread(target=answer, args=(inside,), daemon=True).start()

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield f"127.0.0.1:{listening.getsockname()[1]}"
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.mark.parametrize("protocol", ["http", "async http"])
def test_a_server_that_answers_byte_by_byte_does_not_extend_the_limit(protocol: str) -> None:
    with (
        dripping_server(200) as address,
        CLIENTS[protocol](address, timeout_s=0.3) as client,
        pytest.raises(DeadlineExceeded),
    ):
        client.server_metadata()


def test_the_limit_holds_while_another_task_asks() -> None:
    async def main(address: str) -> list[BaseException]:
        async with AsyncHttpClient(address, timeout_s=OWN_LIMIT_S) as client:
            first = asyncio.create_task(client.metadata("echo"))
            await asyncio.sleep(0)  # it asks now
            results = await asyncio.gather(
                *(client.infer("echo", INPUTS, timeout_s=0.1) for _ in range(3)), return_exceptions=True
            )
            assert not first.done()
            first.cancel()
            return [found for found in results if isinstance(found, BaseException)]

    with silent_server() as address:
        assert [type(error) for error in asyncio.run(main(address))] == [DeadlineExceeded] * 3


def test_a_name_that_is_no_text_is_refused() -> None:
    with GrpcClient("127.0.0.1:1") as client, pytest.raises(InputError, match=r"the version 3 is int; .* '3'"):
        client.infer("echo", INPUTS, version=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("protocol", CLIENTS)
def test_what_cannot_be_sent_is_an_error_of_the_client(protocol: str, triton: TritonAddress) -> None:
    with CLIENTS[protocol](triton.grpc_url if "grpc" in protocol else triton.http_url) as client:
        with pytest.raises(InputError, match=r"no Unicode text"):
            client.infer("echo_text", {"TEXT": [["\ud800"]]})
        with pytest.raises(InputError, match=r"no Unicode text"):
            client.infer("echo_text", {"TEXT": [["a"]]}, request_id="\ud800")
        with pytest.raises(InputError, match=r"give a list of names: \['TEXT_OUT'\]"):
            client.infer("echo_text", {"TEXT": [["a"]]}, outputs="TEXT_OUT")
        with pytest.raises(InputError, match=r"no Unicode text"):
            client.generate("chat", "\udfff")
