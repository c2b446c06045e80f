"""All clients on the real server: the same calls must give the same answers."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from clients import (
    AsyncGrpcClient,
    AsyncHttpClient,
    GrpcClient,
    HttpClient,
    InputError,
    MissingDependency,
    ServerError,
    ServerUnavailable,
    grpc_messages,
)
from clients.base import TritonClient


class Blocking:
    """A client for asyncio, called as those for threads are: in an event loop of its own, from any thread."""

    def __init__(self, client_type: type[AsyncGrpcClient | AsyncHttpClient], url: str, **options: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._client = client_type(url, **options)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            found = getattr(self._client, name)(*args, **kwargs)
            return asyncio.run_coroutine_threadsafe(found, self._loop).result()

        return call

    def __enter__(self) -> Blocking:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


CLIENTS: dict[str, Callable[..., Any]] = {
    "grpc": GrpcClient,
    "http": HttpClient,
    "async grpc": partial(Blocking, AsyncGrpcClient),
    "async http": partial(Blocking, AsyncHttpClient),
}


@pytest.fixture(params=CLIENTS)
def protocol(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def client(protocol: str, echo_server: tuple[str, str]) -> Iterator[TritonClient]:
    http_url, grpc_url = echo_server
    with CLIENTS[protocol](grpc_url if "grpc" in protocol else http_url) as found:
        yield found


def test_c18_byte_strings_come_back_whole(client: TritonClient) -> None:
    answer = client.infer("echo_text", {"TEXT": [[b"ab\x00"]]})["TEXT_OUT"]
    assert answer.tolist() == [[b"ab\x00"]]
    assert len(answer[0, 0]) == 3


def test_c19_strings_round_trip_exactly(client: TritonClient) -> None:
    answer = client.infer("echo_text", {"TEXT": [["a", "", "é"]]})["TEXT_OUT"]
    assert answer.dtype == np.object_ and answer.shape == (1, 3)
    assert [item.decode("utf-8") for item in answer[0]] == ["a", "", "é"]


def test_k01_one_client_serves_16_threads(client: TritonClient) -> None:
    wrong: list[object] = []

    def call(thread: int) -> None:
        try:
            for turn in range(10):
                sent = np.array([[thread, turn, 0.5, -1]], np.float32)
                answer = client.infer("echo", {"INPUT0": sent})["OUTPUT0"]
                if not np.array_equal(answer, sent):
                    wrong.append((sent, answer))
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=call, args=(index,)) for index in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@pytest.mark.parametrize("protocol", ["grpc", "http"], indirect=True)
def test_k01_connections_of_ended_threads_are_closed(client: TritonClient) -> None:
    def call() -> None:
        client.infer("echo", {"INPUT0": [[1, 2, 3, 4]]})

    for _ in range(20):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    assert len(client._connections) <= 2  # the last thread's, and the fixture's


def test_k01_close_leaves_no_descriptor(echo_server: tuple[str, str]) -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    with HttpClient(echo_server[0]) as client:
        threads = [threading.Thread(target=client.infer, args=("echo", {"INPUT0": [[1, 2, 3, 4]]})) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(os.listdir("/proc/self/fd")) <= before
    with pytest.raises(ServerUnavailable, match="closed"):
        client.infer("echo", {"INPUT0": [[1, 2, 3, 4]]})


def test_k03_an_answer_of_5_mib_arrives(client: TritonClient) -> None:
    count = 5 * 2**20 // 4
    values = client.infer("big", {"COUNT": [count]})["VALUES"]
    assert values.nbytes == 5 * 2**20
    assert values[0] == 0 and values[-1] == count - 1


def test_k03_a_request_of_64_mib_is_taken(client: TritonClient) -> None:
    text = b"x" * ((64 if isinstance(client, TritonClient) else 16) * 2**20)
    assert client.infer("echo_text", {"TEXT": [[text]]})["TEXT_OUT"][0, 0] == text


def test_optional_input_comes_from_the_config(client: TritonClient) -> None:
    assert [tensor.optional for tensor in client.metadata("optional").inputs] == [False, True]
    assert client.infer("optional", {"A": [1, 2]})["SUM"].tolist() == [1, 2]
    assert client.infer("optional", {"A": [1, 2], "B": [10, 20]})["SUM"].tolist() == [11, 22]


@pytest.mark.parametrize("name", ["../../x", "a/b", "", ".", "..", "a\nb"])
def test_i06_a_name_with_path_parts_is_not_sent(client: TritonClient, name: str) -> None:
    """As part of a URL it would be another question."""
    for call in (client.metadata, client.config, client.model_ready):
        with pytest.raises(InputError, match="is not allowed"):
            call(name)
    with pytest.raises(InputError, match="the model"):
        client.infer(name, {"INPUT0": [[1, 2, 3, 4]]})
    if name:
        with pytest.raises(InputError, match="the version"):
            client.infer("echo", {"INPUT0": [[1, 2, 3, 4]]}, version=name)


def test_statistics_of_all_models(client: TritonClient) -> None:
    assert sorted({entry["name"] for entry in client.statistics("")}) == client.model_names()


def test_metadata_is_remembered(client: TritonClient) -> None:
    metadata = client.metadata("echo")
    assert metadata is client.metadata("echo")
    assert metadata.max_batch_size == 8
    assert [str(tensor) for tensor in metadata.inputs] == ["INPUT0 (FP32 [-1, 4])"]


def test_outputs_can_be_chosen(client: TritonClient) -> None:
    inputs = {"INPUT0": [[1, 2, 3, 4]]}
    assert set(client.infer("parallel", inputs)) == {"LEFT", "RIGHT"}
    assert set(client.infer("parallel", inputs, outputs=["RIGHT"])) == {"RIGHT"}
    with pytest.raises(InputError, match="no output 'UP'; valid outputs: LEFT, RIGHT"):
        client.infer("parallel", inputs, outputs=["UP"])


def test_a_version_can_be_chosen(client: TritonClient) -> None:
    answer = client.infer("echo", {"INPUT0": [[1, 2, 3, 4]]}, version="1", request_id="abc")
    assert answer["OUTPUT0"].tolist() == [[1, 2, 3, 4]]
    with pytest.raises(ServerError):
        client.infer("echo", {"INPUT0": [[1, 2, 3, 4]]}, version="7")


def test_what_the_server_refuses_is_a_server_error(protocol: str, client: TritonClient) -> None:
    with pytest.raises(ServerError) as raised:
        client.metadata("nope")
    assert raised.value.status == ("NOT_FOUND" if "grpc" in protocol else "404")
    assert "nope" in raised.value.message


def test_what_the_model_fails_is_a_server_error(client: TritonClient) -> None:
    messages = []
    for _ in range(10):
        try:
            client.infer("flaky", {"INPUT0": [[1, 2, 3, 4]]})
        except ServerError as error:
            messages.append(error.message)
    assert len(messages) == 1 and "every 10th request fails" in messages[0]


def test_timeout_of_one_call(client: TritonClient) -> None:
    with pytest.raises(ServerError) as raised:
        client.infer("sleep_50ms", {"INPUT0": [[1, 2, 3, 4]]}, timeout_s=0.005)
    assert raised.value.status == "DEADLINE_EXCEEDED"
    # The client is as good as before.
    assert client.infer("sleep_50ms", {"INPUT0": [[1, 2, 3, 4]]})["OUTPUT0"].tolist() == [[1, 2, 3, 4]]


def test_readiness(client: TritonClient) -> None:
    assert client.is_ready() is True
    assert client.model_ready("echo") is True
    assert client.model_ready("nope") is False
    assert "echo" in client.model_names()
    assert client.server_metadata()["name"] == "triton"


def test_no_server_is_named_by_address(protocol: str) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound, never listening: nobody else can answer there
        address = f"127.0.0.1:{held.getsockname()[1]}"
        with CLIENTS[protocol](address, timeout_s=5) as client:
            assert client.is_ready() is False
            with pytest.raises(ServerUnavailable, match=address) as raised:
                client.infer("echo", {"INPUT0": [[1, 2, 3, 4]]})
    assert raised.value.address == address


def test_http_survives_a_dropped_keep_alive_connection(echo_server: tuple[str, str]) -> None:
    with HttpClient(echo_server[0]) as client:
        client.infer("echo", {"INPUT0": [[1, 2, 3, 4]]})
        client._connection().sock.shutdown(socket.SHUT_RDWR)
        assert client.infer("echo", {"INPUT0": [[5, 6, 7, 8]]})["OUTPUT0"].tolist() == [[5, 6, 7, 8]]


def test_missing_tritonclient_gives_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tritonclient.grpc", None)
    grpc_messages.messages.cache_clear()
    with (
        pytest.raises(MissingDependency, match=r"pip install 'tritonclient\[grpc,http\]'"),
        GrpcClient("127.0.0.1:1") as client,
    ):
        client.config("echo")


@pytest.mark.parametrize("client_type", [HttpClient, GrpcClient])
def test_k01_a_forked_process_has_a_connection_of_its_own(
    client_type: type[GrpcClient | HttpClient], echo_server: tuple[str, str]
) -> None:
    """Both processes would read each other's answers from one socket."""

    def wrong_answers(first: int) -> int:
        sent = (np.full((1, 4), first + turn, np.float32) for turn in range(100))
        return sum(not np.array_equal(one, client.infer("echo", {"INPUT0": one})["OUTPUT0"]) for one in sent)

    with client_type(echo_server[client_type is GrpcClient]) as client:
        assert wrong_answers(0) == 0
        child = os.fork()
        if child == 0:
            code = 1
            try:
                code = 2 * (wrong_answers(1000) > 0)
            finally:
                os._exit(code)
        assert wrong_answers(2000) == 0
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
