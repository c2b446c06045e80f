"""The clients on the language model's real backend: what they hand out is what the engine says."""

from __future__ import annotations

import asyncio
import re
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

import clients.grpc
from backends.llm import LLMEngine, SamplingParams
from clients import (
    AsyncGrpcClient,
    AsyncHttpClient,
    ContextLengthExceeded,
    DeadlineExceeded,
    GrpcClient,
    HttpClient,
    InvalidRequest,
    Overloaded,
    RetryPolicy,
)
from clients.async_base import AsyncTritonClient
from clients.async_grpc_source import GrpcSource
from clients.base import TritonClient
from tests.backends.llm.gguf_files import tiny_with_text
from tests.serving import Served, serve, write_llm

PROMPTS = ("hello", "def fib(n):", "1, 2, 3, 4,", "aus Tür")
CONTEXT = 8192
GREEDY = {"max_tokens": 24, "ignore_eos": True}
ENDLESS = {"max_tokens": 8000, "ignore_eos": True}
Expected = dict[str, tuple[str, tuple[int, ...]]]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with random weights, in exact mode."""
    path = tmp_path_factory.mktemp("clients") / "repository"
    gguf = tiny_with_text(CONTEXT).write(path.parent / "tiny.gguf")
    limits = {"max_num_seqs": 4, "max_waiting": 4, "max_model_len": CONTEXT}
    write_llm(path, "chat", gguf, exact=True, kv_cache_bytes=64 << 20, **limits)
    return path


@pytest.fixture(scope="module")
def plain(repository: Path) -> Expected:
    """Prompt -> the engine's own answer, text and tokens, in exact mode."""
    engine = LLMEngine.load(repository / "chat" / "1")
    try:
        params = SamplingParams(**GREEDY)  # type: ignore[arg-type]
        answers = {prompt: engine.generate([prompt], params)[0].outputs[0] for prompt in PROMPTS}
    finally:
        engine.close()
    return {prompt: (answer.text, tuple(answer.token_ids)) for prompt, answer in answers.items()}


@pytest.fixture(scope="module")
def server(repository: Path, plain: Expected) -> Iterator[Served]:
    with serve(repository) as found:
        yield found


def sync_client(server: Served, protocol: str) -> TritonClient:
    return GrpcClient(server.grpc) if protocol == "grpc" else HttpClient(server.http)


def async_client(server: Served, protocol: str) -> AsyncTritonClient:
    return AsyncGrpcClient(server.grpc) if protocol == "grpc" else AsyncHttpClient(server.http)


@pytest.fixture(params=["grpc", "http"])
def protocol(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def aborted(server: Served) -> int:
    """Answers that the engine gave up, from its own metrics."""
    with urllib.request.urlopen(server.metrics, timeout=10) as response:
        text = response.read().decode()
    found = re.findall(r'^vllm:request_success_total\{[^}]*finished_reason="abort"[^}]*\} (\S+)', text, re.M)
    return sum(int(float(number)) for number in found)


def wait_for_aborted(server: Served, wanted: int) -> None:
    end = time.monotonic() + 60
    while (seen := aborted(server)) != wanted:
        assert time.monotonic() < end, f"{seen} answers were given up, not {wanted}"


def test_streams_side_by_side_are_the_engines_answers(server: Served, plain: Expected, protocol: str) -> None:
    async def test() -> None:
        async with async_client(server, protocol) as client:

            async def read(prompt: str) -> None:
                chunks = [c async for c in client.astream("chat", prompt, token_ids=True, **GREEDY)]
                text, tokens = plain[prompt]
                assert "".join(c.text for c in chunks) == text
                assert tuple(t for c in chunks for t in c.token_ids or ()) == tokens
                assert [c.finish_reason for c in chunks if c.finish_reason] == ["length"]
                assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 24

            await asyncio.gather(*(read(prompt) for prompt in PROMPTS))

    asyncio.run(test())


def test_whole_answers_and_streams_of_threads(server: Served, plain: Expected, protocol: str) -> None:
    text, tokens = plain[PROMPTS[0]]
    with sync_client(server, protocol) as client:
        answer = client.generate("chat", PROMPTS[0], token_ids=True, logprobs=1, **GREEDY)
        assert (answer.text, answer.token_ids, answer.finish_reason) == (text, tokens, "length")
        assert answer.logprobs is not None and [int(next(iter(e))) for e in answer.logprobs] == list(tokens)
        assert answer.usage is not None and answer.usage.prompt_tokens == 5
        assert "".join(chunk.text for chunk in client.stream("chat", PROMPTS[0], **GREEDY)) == text
        two = client.generate("chat", PROMPTS[0], n=2, **GREEDY)
        assert [found.text for found in two.answers] == [text, text]


def test_tokens_and_stop_strings(server: Served, plain: Expected, protocol: str) -> None:
    text, tokens = plain[PROMPTS[2]]
    with sync_client(server, protocol) as client:
        rest = client.generate("chat", PROMPTS[2], max_tokens=4, ignore_eos=True, token_ids=True)
        assert rest.token_ids == tokens[:4]
        stopped = list(client.stream("chat", PROMPTS[2], stop=[text[5:8]], **GREEDY))
        assert "".join(chunk.text for chunk in stopped) == text[: text.index(text[5:8])]
        assert stopped[-1].finish_reason == "stop"


def test_refusals_are_typed(server: Served, protocol: str) -> None:
    with sync_client(server, protocol) as client:
        with pytest.raises(InvalidRequest, match="temperature is -1") as raised:
            client.generate("chat", "x", temperature=-1)
        assert raised.value.param == "temperature"
        with pytest.raises(InvalidRequest, match="no sampling parameter") as raised:
            list(client.stream("chat", "x", temprature=1))
        assert raised.value.param == "temprature"
        with pytest.raises(ContextLengthExceeded, match="8192"):
            client.generate("chat", [1] * 9000)


def test_a_full_queue_is_told_and_what_was_accepted_ends(server: Served) -> None:
    async def test() -> None:
        async with AsyncGrpcClient(server.grpc, retries=RetryPolicy(attempts=1)) as client:
            # Four run for seconds: time enough for all to come.
            calls = (client.generate("chat", "x", max_tokens=2000, ignore_eos=True) for _ in range(40))
            ends = await asyncio.gather(*calls, return_exceptions=True)
            refused = [end for end in ends if isinstance(end, Overloaded)]
            answered = [end for end in ends if not isinstance(end, BaseException)]
            assert refused and answered and len(refused) + len(answered) == 40
            assert refused[0].retry_after_s > 0
            assert {answer.finish_reason for answer in answered} == {"length"}

    asyncio.run(test())


def test_f10_leaving_a_stream_frees_the_engine(server: Served, protocol: str) -> None:
    before = aborted(server)

    async def leave() -> None:
        async with async_client(server, protocol) as client:
            async for _ in client.astream("chat", "Once upon a time", **ENDLESS):
                break
            await asyncio.to_thread(wait_for_aborted, server, before + 2)
            begun = asyncio.Event()

            async def read() -> None:
                async for _ in client.astream("chat", "Once upon a time", **ENDLESS):
                    begun.set()

            task = asyncio.create_task(read())
            await begun.wait()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await asyncio.to_thread(wait_for_aborted, server, before + 3)

    with sync_client(server, protocol) as client:
        for _ in client.stream("chat", "Once upon a time", **ENDLESS):
            break
        wait_for_aborted(server, before + 1)
    asyncio.run(leave())


def test_f10_a_left_stream_ends_as_an_answer_does(server: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """No cancel goes over the wire, which Triton 2.51 now and then does not survive: each call ends with OK."""
    for module in ("leave", "async_grpc", "streams", "async_streams"):
        monkeypatch.setattr(f"clients.{module}.CLOSING_S", 60.0)  # the server may be slow on a busy machine
    calls: list[Any] = []
    for kind in (clients.grpc._GrpcSource, GrpcSource):
        make = kind.__init__

        def noted(self: Any, *given: Any, make: Any = make) -> None:
            calls.extend(one for one in given if hasattr(one, "code"))
            make(self, *given)

        monkeypatch.setattr(kind, "__init__", noted)
    before = aborted(server)
    with GrpcClient(server.grpc) as client:
        for _ in client.stream("chat", "Once upon a time", **ENDLESS):
            break
        streams = [client.stream("chat", "Once upon a time", **ENDLESS) for _ in range(3)]
        for stream in streams:
            next(stream)
        for stream in streams:
            stream.close()

    async def leave() -> None:
        async with AsyncGrpcClient(server.grpc) as client:
            async for _ in client.astream("chat", "Once upon a time", **ENDLESS):
                break
            waiting = client.astream("chat", [5] * 200, **ENDLESS)
            task = asyncio.create_task(anext(waiting))
            await anext(client.astream("chat", "Once upon a time", **ENDLESS))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        assert {await call.code() for call in calls[8:]} == {grpc.StatusCode.OK}

    asyncio.run(leave())
    assert {call.code() for call in calls[:8]} == {grpc.StatusCode.OK} and len(calls) == 14
    wait_for_aborted(server, before + 7)


def test_a_deadline_that_cannot_be_met_is_told(server: Served, protocol: str) -> None:
    with sync_client(server, protocol) as client, pytest.raises(DeadlineExceeded):
        client.generate("chat", "Once upon a time", timeout_s=0.01, **ENDLESS)
