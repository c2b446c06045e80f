"""Language models through the clients for asyncio, on the real server with a model that speaks their tensors."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from clients import (
    AsyncGrpcClient,
    AsyncHttpClient,
    Chunk,
    ClientError,
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineFailed,
    InputError,
    InvalidRequest,
    Overloaded,
    ServerError,
    ServerUnavailable,
    StreamBroken,
    Usage,
)
from clients.async_base import AsyncTritonClient
from tests.serving import ROOT
from tests.triton_models import TritonAddress

FOREVER = {"max_tokens": 100_000}  # at 20 ms a token it takes half an hour: only a cancel can end it in time
SLOW = "wait 20"


Test = Callable[[AsyncTritonClient], Awaitable[None]]
OnServer = Callable[[Test], None]


@pytest.fixture(params=["grpc", "http"])
def on_server(request: pytest.FixtureRequest, triton: TritonAddress) -> OnServer:
    """Runs a test with a client, in an event loop of its own."""

    def run_test(test: Test) -> None:
        async def run() -> None:
            over_grpc = request.param == "grpc"
            client = AsyncGrpcClient(triton.grpc_url) if over_grpc else AsyncHttpClient(triton.http_url)
            async with client:
                await test(client)

        asyncio.run(run())

    return run_test


async def count_of(client: AsyncTritonClient, prompt: str) -> int:
    return int((await client.generate("chat", prompt)).text)


async def until(client: AsyncTritonClient, prompt: str, wanted: int) -> None:
    """Asks until the model counts `wanted`; a count that is never reached fails the test."""
    async with asyncio.timeout(30) if hasattr(asyncio, "timeout") else _NoTimeout():
        while await count_of(client, prompt) != wanted:
            await asyncio.sleep(0.01)


class _NoTimeout:
    """Python 3.10 has no asyncio.timeout: there the test's own end is pytest's."""

    async def __aenter__(self) -> None: ...

    async def __aexit__(self, *error: object) -> None: ...


def test_text_comes_in_pieces_and_the_last_one_says_why_it_ends(on_server: OnServer) -> None:
    async def test(client: AsyncTritonClient) -> None:
        chunks = [chunk async for chunk in client.astream("chat", "two words", max_tokens=3)]
        assert chunks == [
            Chunk("w0 "),
            Chunk("w1 "),
            Chunk("w2 ", finish_reason="length", usage=Usage(prompt_tokens=2, completion_tokens=3)),
        ]

    on_server(test)


def test_whole_answer(on_server: OnServer) -> None:
    async def test(client: AsyncTritonClient) -> None:
        answer = await client.generate("chat", "go", max_tokens=4)
        assert (answer.text, answer.finish_reason) == ("w0 w1 w2 w3 ", "length")
        assert answer.usage == Usage(prompt_tokens=1, completion_tokens=4, cached_tokens=0)
        assert answer.logprobs is None and answer.token_ids is None

    on_server(test)


def test_a_model_that_never_says_why_it_ends_is_read_to_the_end(on_server: OnServer) -> None:
    async def test(client: AsyncTritonClient) -> None:
        chunks = [chunk async for chunk in client.astream("untold", "two words", max_tokens=3)]
        assert chunks == [Chunk("w0 "), Chunk("w1 "), Chunk("w2 ")]

    on_server(test)


def test_what_is_asked_for_is_what_is_sent(on_server: OnServer) -> None:
    async def test(client: AsyncTritonClient) -> None:
        answer = await client.generate(
            "chat",
            "inputs",
            temperature=0.7,
            stop=["\n", "é"],
            logit_bias={5: -1.5},
            seed=None,
            timeout_s=9,
            request_id="abc",
            tensors={"priority": 3, "client": "é", "cache_salt": None},
        )
        sent = json.loads(answer.text)
        assert json.loads(sent["sampling_parameters"][0]) == {
            "temperature": 0.7,
            "stop": ["\n", "é"],
            "logit_bias": {"5": -1.5},
        }
        assert sent["text_input"] == ["inputs"] and "input_ids" not in sent
        assert sent["stream"] == [False] and sent["exclude_input_in_output"] == [True]
        assert sent["deadline_ms"] == [9000.0]
        assert sent["priority"] == [3] and sent["client"] == ["é"] and "cache_salt" not in sent
        for absent in ("return_logprobs", "return_token_ids", "return_cumulative_logprob"):
            assert absent not in sent

    on_server(test)


def test_a_prompt_may_be_token_ids(on_server: OnServer) -> None:
    async def test(client: AsyncTritonClient) -> None:
        for prompt in ([5, 6, 7], (5, 6, 7), np.array([5, 6, 7], np.int64), np.array([5, 6, 7], np.int32)):
            answer = await client.generate("chat", prompt, max_tokens=1)
            assert answer.usage == Usage(prompt_tokens=3, completion_tokens=1)

    on_server(test)


@pytest.mark.parametrize(
    ("prompt", "options", "says"),
    [
        ([[1, 2]], {}, "flat sequence of token ids"),
        ([1.5], {}, "flat sequence of token ids"),
        (["a"], {}, "flat sequence of token ids"),
        ([2**40], {}, "allows -2147483648 to 2147483647"),
        ("go", {"stop": {1, 2}}, "are no JSON"),
        ("go", {"temperature": float("nan")}, "are no JSON"),
        ("go", {"tensors": {"nope": 1}}, "no input 'nope'"),
        ("go", {"tensors": {"stream": True}}, "cannot be given"),
    ],
)
def test_what_cannot_be_sent_is_refused_before(
    on_server: OnServer, prompt: Any, options: dict[str, Any], says: str
) -> None:
    async def test(client: AsyncTritonClient) -> None:
        with pytest.raises(InputError, match=says):
            await client.generate("chat", prompt, **options)
        with pytest.raises(InputError, match=says):
            async for _ in client.astream("chat", prompt, **options):
                pass

    on_server(test)


def test_a_model_that_is_no_language_model_is_named(on_server: OnServer) -> None:
    async def test(client: AsyncTritonClient) -> None:
        with pytest.raises(InputError, match="'echo' is no language model: its inputs are INPUT0"):
            await client.generate("echo", "go")
        with pytest.raises(ServerError, match="nope"):
            await client.generate("nope", "go")

    on_server(test)


def test_g35_log_probabilities_and_tokens_come_when_asked_for(on_server: OnServer) -> None:
    async def test(client: AsyncTritonClient) -> None:
        plain = [chunk async for chunk in client.astream("chat", "go", max_tokens=2)]
        assert [(c.logprobs, c.token_ids, c.cumulative_logprob) for c in plain] == [(None, None, None)] * 2
        asked = [chunk async for chunk in client.astream("chat", "go", max_tokens=2, logprobs=0, token_ids=True)]
        assert [chunk.token_ids for chunk in asked] == [(0,), (1,)]
        assert [chunk.cumulative_logprob for chunk in asked] == [-0.5, -1.0]
        assert asked[0].logprobs == [
            {"0": {"logprob": -0.5, "rank": 1, "decoded_token": "w0 ", "bytes": [119, 48, 32]}}
        ]

    on_server(test)


def test_several_answers_keep_apart_and_end_once_each(on_server: OnServer) -> None:
    async def test(client: AsyncTritonClient) -> None:
        chunks = [chunk async for chunk in client.astream("chat", "go", max_tokens=3, n=2)]
        texts = {index: "".join(c.text for c in chunks if c.index == index) for index in (0, 1)}
        assert texts == {0: "w0 w1 w2 ", 1: "w0 w1 "}
        assert [(c.index, c.finish_reason) for c in chunks if c.finish_reason] == [(1, "length"), (0, "length")]
        whole = await client.generate("chat", "go", max_tokens=2, n=3)
        assert [answer.text for answer in whole.answers] == ["w0 w1 "] * 3

    on_server(test)


def test_k02_eight_streams_at_once_on_one_client(on_server: OnServer) -> None:
    async def test(client: AsyncTritonClient) -> None:
        async def one(word: str) -> tuple[str, str]:
            return word, "".join([c.text async for c in client.astream("chat", f"say {word}", max_tokens=50)])

        for word, text in await asyncio.gather(*(one(word) for word in "abcdefgh")):
            assert text == "".join(f"{word}{index} " for index in range(50))

    on_server(test)


def test_f10_leaving_the_loop_cancels_on_the_server(on_server: OnServer) -> None:
    async def test(client: AsyncTritonClient) -> None:
        before = await count_of(client, "cancelled")
        async for _ in client.astream("chat", SLOW, **FOREVER):
            break
        await until(client, "cancelled", before + 1)
        with pytest.raises(ZeroDivisionError):
            async for _ in client.astream("chat", SLOW, **FOREVER):
                raise ZeroDivisionError
        gc.collect()  # the traceback kept the stream
        await until(client, "cancelled", before + 2)
        assert await count_of(client, "running") == 0

    on_server(test)


def test_f10_a_kept_stream_is_cancelled_by_its_block_and_by_aclose(on_server: OnServer) -> None:
    async def test(client: AsyncTritonClient) -> None:
        before = await count_of(client, "cancelled")
        async with client.astream("chat", SLOW, **FOREVER) as stream:
            async for _ in stream:
                break
        await until(client, "cancelled", before + 1)
        other = client.astream("chat", SLOW, **FOREVER)
        await anext(other)
        await other.aclose()
        await until(client, "cancelled", before + 2)
        assert [chunk async for chunk in other] == []

    on_server(test)


def test_f10_a_cancelled_task_cancels_on_the_server(on_server: OnServer) -> None:
    async def test(client: AsyncTritonClient) -> None:
        before = await count_of(client, "cancelled")
        begun = asyncio.Event()

        async def read() -> None:
            async for _ in client.astream("chat", SLOW, **FOREVER):
                begun.set()

        task = asyncio.create_task(read())
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(client, "cancelled", before + 1)

    on_server(test)


def test_f10_another_task_may_close_a_stream_that_is_waiting(on_server: OnServer) -> None:
    async def test(client: AsyncTritonClient) -> None:
        before = await count_of(client, "cancelled")
        stream = client.astream("chat", "wait 200", **FOREVER)
        await anext(stream)
        reading = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        await stream.aclose()
        with pytest.raises(StreamBroken, match="another task closed it"):
            await reading
        await until(client, "cancelled", before + 1)

    on_server(test)


def test_a_closed_client_ends_a_stream_that_is_waiting(on_server: OnServer, triton: TritonAddress) -> None:
    async def test(client: AsyncTritonClient) -> None:
        async with AsyncGrpcClient(triton.grpc_url) as other:
            before = await count_of(other, "cancelled")
            stream = client.astream("chat", "wait 200", **FOREVER)
            await anext(stream)
            reading = asyncio.create_task(anext(stream))
            await asyncio.sleep(0)
            await client.close()
            with pytest.raises(StreamBroken, match="this client was closed"):
                await asyncio.wait_for(reading, 60)  # far below the stream's own limit
            await until(other, "cancelled", before + 1)

    on_server(test)


def test_only_one_task_reads_a_stream_at_a_time(on_server: OnServer) -> None:
    async def test(client: AsyncTritonClient) -> None:
        before = await count_of(client, "cancelled")
        stream = client.astream("chat", "wait 200", **FOREVER)
        reading = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        with pytest.raises(ClientError, match="another task waits for the next chunk"):
            await anext(stream)
        await reading
        await stream.aclose()
        await until(client, "cancelled", before + 1)

    on_server(test)


def test_a_stream_that_is_never_read_sends_nothing(on_server: OnServer) -> None:
    async def test(client: AsyncTritonClient) -> None:
        client.astream("chat", SLOW, **FOREVER)
        await client.astream("chat", SLOW, **FOREVER).aclose()
        assert await count_of(client, "running") == 0

    on_server(test)


@pytest.mark.parametrize(
    ("prompt", "kind"),
    [
        ("fail invalid_request:top_k", InvalidRequest),
        ("fail invalid_request", InvalidRequest),
        ("fail context_length_exceeded", ContextLengthExceeded),
        ("fail overloaded", Overloaded),
        ("fail deadline", DeadlineExceeded),
        ("fail internal", EngineFailed),
        ("fail something_new", ServerError),
    ],
)
def test_refusals_are_typed(on_server: OnServer, prompt: str, kind: type[ServerError]) -> None:
    async def test(client: AsyncTritonClient) -> None:
        for stream in (True, False):
            with pytest.raises(ServerError) as raised:
                if stream:
                    [chunk async for chunk in client.astream("chat", prompt)]
                else:
                    await client.generate("chat", prompt)
            assert type(raised.value) is kind and "this was asked for" in raised.value.message
            if isinstance(raised.value, InvalidRequest):
                assert raised.value.param == ("top_k" if "top_k" in prompt else "")
        # One request's error is its own.
        assert (await client.generate("chat", "go", max_tokens=1)).text == "w0 "

    on_server(test)


def test_an_error_in_the_middle_comes_after_what_was_said(on_server: OnServer) -> None:
    async def test(client: AsyncTritonClient) -> None:
        said = []
        with pytest.raises(EngineFailed, match="the engine failed"):
            async for chunk in client.astream("chat", "break 2"):
                said.append(chunk.text)
        assert said == ["w0 ", "w1 "]
        said.clear()
        with pytest.raises(StreamBroken, match="without a reason to finish"):
            async for chunk in client.astream("chat", "cut 3"):
                said.append(chunk.text)
        assert said == ["w0 ", "w1 ", "w2 "]

    on_server(test)


def test_a_time_limit_ends_an_answer_that_does_not_come(on_server: OnServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clients.core.DEADLINE_GRACE_S", 0.1)

    async def test(client: AsyncTritonClient) -> None:
        before = await count_of(client, "cancelled")
        # The test's model knows no deadline: the client's own limit, later by its grace, has to do.
        with pytest.raises(DeadlineExceeded):
            async for _ in client.astream("chat", "wait 50", timeout_s=0.01, **FOREVER):
                pass
        await until(client, "cancelled", before + 1)

    on_server(test)


def test_a_closed_client_ends_its_streams_and_refuses_more(on_server: OnServer, triton: TritonAddress) -> None:
    async def test(client: AsyncTritonClient) -> None:
        other = AsyncGrpcClient(triton.grpc_url)
        before = await count_of(other, "cancelled")
        stream = client.astream("chat", SLOW, **FOREVER)
        await anext(stream)
        await client.close()
        with pytest.raises(StreamBroken):
            async for _ in stream:
                pass
        with pytest.raises(ServerUnavailable, match="closed"):
            await client.generate("chat", "go")
        await client.close()
        await until(other, "cancelled", before + 1)
        await other.close()

    on_server(test)


def test_1000_requests_at_once(on_server: OnServer) -> None:
    async def test(client: AsyncTritonClient) -> None:
        async def one(value: int) -> bool:
            answer = await client.infer("echo", {"INPUT0": np.full((1, 4), value, np.float32)})
            return answer["OUTPUT0"].tolist() == [[value] * 4]

        assert all(await asyncio.gather(*(one(value) for value in range(1000))))

    on_server(test)


def test_f08_requests_that_wait_overlap(on_server: OnServer) -> None:
    async def test(client: AsyncTritonClient) -> None:
        tasks = [asyncio.create_task(client.generate("chat", "hold 10", max_tokens=1)) for _ in range(10)]
        # None of the ten is answered before all ten are under way.
        assert [answer.text for answer in await asyncio.gather(*tasks)] == ["w0 "] * 10

    on_server(test)


_READ_TWO_AND_HANG = """
import sys
from clients import GrpcClient, HttpClient
client = GrpcClient(sys.argv[2]) if sys.argv[1] == "grpc" else HttpClient(sys.argv[2])
stream = client.stream("chat", "wait 20", max_tokens=100_000)
print(next(stream).text, next(stream).text, flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_f09_a_client_that_is_killed_ends_its_answer(protocol: str, triton: TritonAddress) -> None:
    address = triton.grpc_url if protocol == "grpc" else triton.http_url

    async def test() -> None:
        async with AsyncGrpcClient(triton.grpc_url) as client:
            before = await count_of(client, "cancelled")
            command = [sys.executable, "-c", _READ_TWO_AND_HANG, protocol, address]
            process = await asyncio.create_subprocess_exec(
                *command, cwd=ROOT, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
            )
            assert process.stdout is not None
            assert await process.stdout.readline() == b"w0  w1 \n"
            process.kill()
            await process.wait()
            await until(client, "cancelled", before + 1)

    asyncio.run(test())
