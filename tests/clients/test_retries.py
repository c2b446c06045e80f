"""When a call is made again, and when it must not be: the rules alone, and a server that is away or breaks off."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest

from clients import (
    AsyncGrpcClient,
    AsyncHttpClient,
    ClientClosed,
    ClientError,
    DeadlineExceeded,
    GrpcClient,
    HttpClient,
    InputError,
    Overloaded,
    RetryPolicy,
    ServerError,
    ServerUnavailable,
    StreamBroken,
)
from clients.retries import Attempts, RetryBudget
from tests.triton_models import TritonAddress

INPUTS = {"INPUT0": [[1, 2, 3, 4]]}


@pytest.mark.parametrize(
    ("error", "question", "inference", "resent"),
    [
        (ServerUnavailable("a"), True, True, True),
        (ServerUnavailable("a", sent=True), True, False, True),
        (StreamBroken("a", "gone"), True, False, True),
        (ServerError("UNAVAILABLE", "not ready"), True, False, True),
        (ServerError("503", "not ready"), True, False, True),
        (ServerError("INTERNAL", "failed"), False, False, False),
        (Overloaded("UNAVAILABLE", "full"), False, False, False),
        (DeadlineExceeded("DEADLINE_EXCEEDED", "late"), False, False, False),
        (ClientClosed("a"), False, False, False),
        (InputError("wrong"), False, False, False),
    ],
)
def test_what_may_be_done_again(error: ClientError, question: bool, inference: bool, resent: bool) -> None:
    assert RetryPolicy().allows(error, repeatable=True) is question
    assert RetryPolicy().allows(error, repeatable=False) is inference
    assert RetryPolicy(resend=True).allows(error, repeatable=False) is resent


def attempts(policy: RetryPolicy, budget: RetryBudget, timeout_s: float = 60.0) -> Attempts:
    return Attempts(policy, budget, timeout_s, repeatable=True, clock=lambda: 0.0, fraction=lambda: 0.0)


def waits(policy: RetryPolicy, budget: RetryBudget, timeout_s: float = 60.0) -> list[float]:
    tries, found = attempts(policy, budget, timeout_s), []
    error = ServerUnavailable("a")
    with pytest.raises(ServerUnavailable) as raised:
        while True:
            found.append(tries.wait_s(error))
    assert raised.value is error
    return found


def test_waits_double_up_to_the_longest_and_end() -> None:
    assert waits(RetryPolicy(attempts=6, first_s=0.1, longest_s=0.5), RetryBudget()) == [0.1, 0.2, 0.4, 0.5, 0.5]
    assert waits(RetryPolicy(attempts=1), RetryBudget()) == []
    assert RetryPolicy(first_s=0.1).wait_s(1, fraction=1.0) == 0.1  # half of 0.2 is left to chance


def test_no_wait_reaches_beyond_the_time_limit() -> None:
    assert waits(RetryPolicy(attempts=9, first_s=1, longest_s=8), RetryBudget(), timeout_s=4.0) == [1, 2]


def test_a_budget_stops_a_storm_and_is_earned_again() -> None:
    budget = RetryBudget()
    assert sum(len(waits(RetryPolicy(attempts=5), budget)) for _ in range(10)) == 10
    for _ in range(11):
        attempts(RetryPolicy(), budget).succeeded()
    assert len(waits(RetryPolicy(attempts=5), budget)) == 1


@pytest.mark.parametrize("wrong", [{"attempts": 0}, {"first_s": -1}, {"first_s": 3, "longest_s": 2}])
def test_a_policy_that_makes_no_sense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(InputError, match="attempts of 1 or more"):
        RetryPolicy(**wrong)  # type: ignore[arg-type]


class Door:
    """A port in front of a server: shut, or it cuts the first connections after their request, or it lets through."""

    def __init__(self, server: str, cut: int = 0) -> None:
        self._server = server
        self._cut = cut
        self._listener = socket.socket()
        self._listener.bind(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.requests: list[bytes] = []
        self._open = False

    def open(self) -> None:
        if not self._open:
            self._open = True
            self._listener.listen()
            threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                inside, _ = self._listener.accept()
            except OSError:
                return
            if len(self.requests) < self._cut:
                self.requests.append(inside.recv(65536))
                inside.close()
                continue
            host, port = self._server.split(":")
            outside = socket.create_connection((host, int(port)))
            for source, sink in ((inside, outside), (outside, inside)):
                threading.Thread(target=_pump, args=(source, sink), daemon=True).start()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    try:
        while data := source.recv(65536):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        pass


@contextmanager
def door(server: str, cut: int = 0) -> Iterator[Door]:
    found = Door(server, cut)
    try:
        yield found
    finally:
        found.close()


@dataclass(frozen=True)
class WhenRefused(RetryPolicy):
    """Does something before the first wait, which shows that there was one."""

    action: Callable[[], None] = print

    def wait_s(self, retry: int, fraction: float) -> float:
        self.action()
        return super().wait_s(retry, fraction)


@pytest.mark.parametrize("client_type", [GrpcClient, HttpClient])
def test_a_server_that_comes_late_is_reached(client_type: type[GrpcClient | HttpClient], triton: TritonAddress) -> None:
    with (
        door(triton.grpc_url if client_type is GrpcClient else triton.http_url) as entry,
        client_type(entry.address, retries=WhenRefused(attempts=20, action=entry.open)) as client,
    ):
        assert client.infer("echo", INPUTS)["OUTPUT0"].tolist() == [[1, 2, 3, 4]]
        assert client.generate("chat", "go", max_tokens=1).text == "w0 "


@pytest.mark.parametrize("client_type", [AsyncGrpcClient, AsyncHttpClient])
def test_a_server_that_comes_late_is_reached_by_asyncio(
    client_type: type[AsyncGrpcClient | AsyncHttpClient], triton: TritonAddress
) -> None:
    async def test() -> None:
        with door(triton.grpc_url if client_type is AsyncGrpcClient else triton.http_url) as entry:
            async with client_type(entry.address, retries=WhenRefused(attempts=20, action=entry.open)) as client:
                assert (await client.infer("echo", INPUTS))["OUTPUT0"].tolist() == [[1, 2, 3, 4]]

    asyncio.run(test())


def test_an_inference_that_broke_off_is_sent_again_only_if_that_was_allowed(triton: TritonAddress) -> None:
    for resend in (False, True):
        with door(triton.http_url, cut=1) as entry:
            entry.open()
            with HttpClient(entry.address, retries=RetryPolicy(resend=resend)) as client:
                with HttpClient(triton.http_url) as direct:
                    client._metadata[("echo", "")] = direct.metadata("echo")
                if resend:
                    assert client.infer("echo", INPUTS)["OUTPUT0"].tolist() == [[1, 2, 3, 4]]
                else:
                    with pytest.raises(ServerUnavailable) as raised:
                        client.infer("echo", INPUTS)
                    assert raised.value.sent
            assert len(entry.requests) == 1 and b"/v2/models/echo/infer" in entry.requests[0]


def test_a_question_that_broke_off_is_asked_again(triton: TritonAddress) -> None:
    async def asked(address: str) -> str:
        async with AsyncHttpClient(address) as client:
            return str((await client.server_metadata())["name"])

    with door(triton.http_url, cut=2) as entry:
        entry.open()
        with HttpClient(entry.address) as client:
            assert client.server_metadata()["name"] == "triton"
        assert len(entry.requests) == 2
    with door(triton.http_url, cut=2) as entry:
        entry.open()
        assert asyncio.run(asked(entry.address)) == "triton"


def test_readiness_is_answered_at_once() -> None:
    with door("127.0.0.1:1") as entry:
        opened: list[bool] = []
        with HttpClient(entry.address, retries=WhenRefused(action=lambda: opened.append(True))) as client:
            assert client.is_ready() is False
        assert opened == []


@pytest.mark.parametrize("client_type", [HttpClient, AsyncHttpClient])
def test_no_compressed_answer_is_asked_for(client_type: type[HttpClient | AsyncHttpClient]) -> None:
    """Triton would compress: an answer of 5 MiB took it two seconds."""

    async def ask(client: AsyncHttpClient) -> None:
        async with client:
            await client.server_metadata()

    with door("127.0.0.1:1", cut=2) as entry:  # aiohttp itself asks a question twice
        entry.open()
        client = client_type(entry.address, retries=RetryPolicy(attempts=1))
        with pytest.raises(ServerUnavailable):
            asyncio.run(ask(client)) if isinstance(client, AsyncHttpClient) else client.server_metadata()
        assert b"accept-encoding: identity\r\n" in entry.requests[0].lower()
