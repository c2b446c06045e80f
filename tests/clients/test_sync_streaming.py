"""Language models through the clients for threads, on the real server: what differs from test_streaming.py."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator

import pytest

from clients import (
    Chunk,
    ClientError,
    DeadlineExceeded,
    EngineFailed,
    GrpcClient,
    HttpClient,
    InvalidRequest,
    ServerUnavailable,
    StreamBroken,
    Usage,
)
from clients.base import TritonClient
from tests.triton_models import TritonAddress

FOREVER = {"max_tokens": 100_000}
SLOW = "wait 20"


@pytest.fixture(params=["grpc", "http"])
def client(request: pytest.FixtureRequest, triton: TritonAddress) -> Iterator[TritonClient]:
    found = GrpcClient(triton.grpc_url) if request.param == "grpc" else HttpClient(triton.http_url)
    with found:
        yield found


def count_of(client: TritonClient, prompt: str) -> int:
    return int(client.generate("chat", prompt).text)


def until(client: TritonClient, prompt: str, wanted: int) -> None:
    """Asks until the model counts `wanted`."""
    end = time.monotonic() + 30
    while (seen := count_of(client, prompt)) != wanted:
        assert time.monotonic() < end, f"{prompt}: {seen}, not {wanted}"


def test_text_comes_in_pieces_and_the_last_one_says_why_it_ends(client: TritonClient) -> None:
    assert list(client.stream("chat", "two words", max_tokens=3)) == [
        Chunk("w0 "),
        Chunk("w1 "),
        Chunk("w2 ", finish_reason="length", usage=Usage(prompt_tokens=2, completion_tokens=3)),
    ]


def test_a_model_that_never_says_why_it_ends_is_read_to_the_end(client: TritonClient) -> None:
    assert [chunk.text for chunk in client.stream("untold", "two words", max_tokens=3)] == ["w0 ", "w1 ", "w2 "]


def test_whole_answer(client: TritonClient) -> None:
    answer = client.generate("chat", [1, 2, 3], max_tokens=2, n=2, logprobs=1)
    assert [found.text for found in answer.answers] == ["w0 w1 "] * 2
    assert answer.usage == Usage(prompt_tokens=3, completion_tokens=2)
    assert answer.logprobs is not None and answer.logprobs[0]["1"]["logprob"] == -0.5


def test_f10_leaving_the_loop_cancels_on_the_server(client: TritonClient) -> None:
    before = count_of(client, "cancelled")
    for _ in client.stream("chat", SLOW, **FOREVER):
        break
    until(client, "cancelled", before + 1)
    with client.stream("chat", SLOW, **FOREVER) as stream:
        next(stream)
    until(client, "cancelled", before + 2)
    assert list(stream) == []


def test_f10_another_thread_may_close_a_stream_that_is_waiting(client: TritonClient) -> None:
    before = count_of(client, "cancelled")
    stream = client.stream("chat", "wait 200", **FOREVER)
    next(stream)
    closer = threading.Timer(0.05, stream.close)
    closer.start()
    with pytest.raises(StreamBroken, match="another thread closed it"):
        for _ in stream:
            pass
    closer.join()
    until(client, "cancelled", before + 1)


def test_only_one_thread_reads_a_stream_at_a_time(client: TritonClient) -> None:
    with client.stream("chat", SLOW, **FOREVER) as stream:
        next(stream)
        stream.waiting_since = time.monotonic()  # as while another thread reads
        with pytest.raises(ClientError, match="another thread waits for the next chunk"):
            next(stream)
        stream.waiting_since = None
        next(stream)


def test_a_stream_closed_between_a_chunks_coming_and_its_handing_out_says_so(client: TritonClient) -> None:
    stream = client.stream("chat", SLOW, **FOREVER)
    next(stream)

    class Closing(deque[Chunk]):
        """Closes the stream right after it was seen to have a chunk, as another thread may."""

        def __bool__(self) -> bool:
            if found := len(self) > 0:
                stream.close()
            return found

    stream._ready = Closing()
    with pytest.raises(StreamBroken, match="another thread closed it"):
        next(stream)


def test_k02_eight_streams_in_eight_threads(client: TritonClient) -> None:
    texts: dict[str, str] = {}

    def read(word: str) -> None:
        texts[word] = "".join(chunk.text for chunk in client.stream("chat", f"say {word}", max_tokens=30))

    threads = [threading.Thread(target=read, args=(word,)) for word in "abcdefgh"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == {word: "".join(f"{word}{index} " for index in range(30)) for word in "abcdefgh"}


def test_k02_two_streams_in_one_thread_by_turns(client: TritonClient) -> None:
    streams = (client.stream("chat", f"say {word}", max_tokens=3) for word in "ab")
    assert [(a.text, b.text) for a, b in zip(*streams, strict=True)] == [(f"a{i} ", f"b{i} ") for i in range(3)]


def test_errors_are_typed(client: TritonClient) -> None:
    with pytest.raises(InvalidRequest, match="temperature is -1") as raised:
        client.generate("chat", "go", temperature=-1)
    assert raised.value.param == "temperature"
    said = []
    with pytest.raises(EngineFailed):
        for chunk in client.stream("chat", "break 2"):
            said.append(chunk.text)
    with pytest.raises(StreamBroken, match="without a reason to finish"):
        for chunk in client.stream("chat", "cut 1"):
            said.append(chunk.text)
    assert said == ["w0 ", "w1 ", "w0 "]


def test_a_time_limit_ends_an_answer_that_does_not_come(client: TritonClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clients.core.DEADLINE_GRACE_S", 0.1)
    before = count_of(client, "cancelled")
    with pytest.raises(DeadlineExceeded):
        list(client.stream("chat", "wait 50", timeout_s=0.01, **FOREVER))
    until(client, "cancelled", before + 1)


def test_a_closed_client_ends_its_streams_and_refuses_more(client: TritonClient, triton: TritonAddress) -> None:
    with GrpcClient(triton.grpc_url) as other:
        before = count_of(other, "cancelled")
        stream = client.stream("chat", SLOW, **FOREVER)
        next(stream)
        client.close()
        with pytest.raises(ServerUnavailable):
            list(stream)
        with pytest.raises(ServerUnavailable, match="closed"):
            client.generate("chat", "go")
        with pytest.raises(ServerUnavailable, match="closed"):
            list(client.stream("chat", "go"))
        until(other, "cancelled", before + 1)
