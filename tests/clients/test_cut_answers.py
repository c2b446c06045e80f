"""i11: an HTTP answer that was cut on its way is called so, whoever cut it: never an error of its JSON."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from clients import AsyncHttpClient, ClientError, HttpClient, InputError, RetryPolicy, ServerError, StreamBroken
from clients.grpc_messages import messages
from clients.grpc_protocol import GrpcProtocol
from clients.requests import InferRequest
from perf.errors import PerfError
from perf.llm.prompts import PromptOptions
from perf.llm.session import LlmQuestion, open_llm_session

ONCE = RetryPolicy(attempts=1)
METADATA = {
    "/v2/models/m": {
        "name": "m",
        "versions": ["1"],
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [4]}],
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [4]}],
    },
    "/v2/models/m/config": {"name": "m", "max_batch_size": 0},
}
OUTPUTS = json.dumps(
    {"outputs": [{"name": "y", "datatype": "FP32", "shape": [4], "parameters": {"binary_data_size": 16}}]}
).encode()
ANSWER = OUTPUTS + bytes(16)


@contextmanager
def answering(body: bytes, declared: int) -> Iterator[str]:
    """A server that answers /v2 and inferences with `body`, of which it claims another length."""
    listening = socket.create_server(("127.0.0.1", 0))

    def one(connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as file:
            path = file.readline().split()[1].decode()
            length = 0
            while line := file.readline().strip().lower():
                if line.startswith(b"content-length:"):
                    length = int(line.partition(b":")[2])
            file.read(length)
            known = json.dumps(METADATA[path]).encode() if path in METADATA else None
            content, size = (body, declared) if known is None else (known, len(known))
            head = f"HTTP/1.1 200 OK\r\ncontent-length: {size}\r\ninference-header-content-length: {len(OUTPUTS)}\r\n"
            connection.sendall(head.encode() + b"connection: close\r\n\r\n" + content)

    def accept() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            threading.Thread(target=one, args=(connection,)).start()

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        yield f"127.0.0.1:{listening.getsockname()[1]}"
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()
        listening.close()


def outcome(kind: str, address: str, call: str) -> Any:
    """What a call ends with: its answer, or its error."""
    arguments: tuple[Any, ...] = ("m", {"x": [1, 2, 3, 4]}) if call == "infer" else ()

    async def in_loop() -> Any:
        async with AsyncHttpClient(address, retries=ONCE) as client:
            return await getattr(client, call)(*arguments)

    try:
        if kind == "async":
            return asyncio.run(in_loop())
        with HttpClient(address, retries=ONCE) as client:
            return getattr(client, call)(*arguments)
    except ClientError as error:
        return error


@pytest.mark.parametrize("kind", ["threads", "async"])
def test_the_whole_answer_is_read(kind: str) -> None:
    """What the other tests cut is right where it is whole."""
    with answering(ANSWER, len(ANSWER)) as address:
        assert outcome(kind, address, "infer")["y"].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("length", [0, 1, len(OUTPUTS) - 1, len(OUTPUTS), len(ANSWER) - 1])
@pytest.mark.parametrize("kind", ["threads", "async"])
def test_i11_an_answer_that_was_cut(kind: str, length: int) -> None:
    with answering(ANSWER[:length], len(ANSWER)) as address:  # the connection broke
        error = outcome(kind, address, "infer")
    assert type(error) is StreamBroken and error.sent
    assert "broke off" in str(error) and "JSON" not in str(error) and str(length) in str(error)
    with answering(ANSWER[:length], length) as address:  # somebody between cut it, and says so of its length
        error = outcome(kind, address, "infer")
    assert type(error) is ServerError
    assert f"the answer is cut, or not one of Triton's: {length} bytes" in str(error)


@pytest.mark.parametrize("body", [b"<html>welcome</html>", b"[]", b"", b'{"name": "tri', b"\xff"])
@pytest.mark.parametrize("kind", ["threads", "async"])
def test_what_is_no_answer_of_triton_is_an_error_of_the_client(kind: str, body: bytes) -> None:
    with answering(body, len(body)) as address:
        error = outcome(kind, address, "infer")
    assert type(error) is ServerError and f"{len(body)} bytes" in str(error)
    if body != b"[]":
        with answering(body, len(body)) as address:
            assert type(outcome(kind, address, "server_metadata")) is ServerError


def test_i11_perf_report_says_that_the_list_of_models_was_cut() -> None:
    models = json.dumps({"data": [{"id": "m"}]}).encode()
    with (
        answering(models[:9], len(models)) as address,
        pytest.raises(PerfError, match=r"the answer of .*/v1/models broke off"),
    ):
        open_llm_session(LlmQuestion("m", "openai", address, PromptOptions()))


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_model_that_was_loaded_anew_is_asked_for_again(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not fit what is remembered of a model may fit the version that the server has by now."""

    async def in_loop(address: str) -> list[Any]:
        async with AsyncHttpClient(address, retries=ONCE) as client:
            first = await client.infer("m", {"x": [1, 2, 3, 4]})
            load_another()
            second = await client.infer("m", {"z": [1, 2]})
            with pytest.raises(InputError, match=r"has no input 'x'; valid inputs: z \(FP32 \[2\]\)"):
                await client.infer("m", {"x": [1, 2, 3, 4]})
            return [first, second]

    def in_thread(address: str) -> list[Any]:
        with HttpClient(address, retries=ONCE) as client:
            first = client.infer("m", {"x": [1, 2, 3, 4]})
            load_another()
            second = client.infer("m", {"z": [1, 2]})
            with pytest.raises(InputError, match=r"has no input 'x'; valid inputs: z \(FP32 \[2\]\)"):
                client.infer("m", {"x": [1, 2, 3, 4]})
            return [first, second]

    def load_another() -> None:
        inputs = [{"name": "z", "datatype": "FP32", "shape": [2]}]
        monkeypatch.setitem(METADATA, "/v2/models/m", {**METADATA["/v2/models/m"], "inputs": inputs})

    with answering(ANSWER, len(ANSWER)) as address:
        answers = asyncio.run(in_loop(address)) if kind == "async" else in_thread(address)
    assert [answer["y"].tolist() for answer in answers] == [[0, 0, 0, 0]] * 2


def test_a_grpc_answer_that_cannot_be_read_is_an_error_of_the_answer() -> None:
    call = GrpcProtocol().infer(InferRequest("m", "", ()))
    answer = messages().ModelInferResponse(model_name="m")
    answer.outputs.add(name="y", datatype="FP32", shape=[4])
    for contents in ([], [bytes(3)]):
        del answer.raw_output_contents[:]
        answer.raw_output_contents.extend(contents)
        with pytest.raises(ServerError, match="the answer cannot be read"):
            call.parse(answer)
