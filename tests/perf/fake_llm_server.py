"""A language model that does as it is told, over SSE and over Triton's gRPC stream: the oracle for what is measured.

Real sockets; for each request it keeps when it came and when each chunk left, on the clock that the client uses.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc

INPUTS = {"text_input": "BYTES", "input_ids": "INT32", "stream": "BOOL", "sampling_parameters": "BYTES"}
INPUTS |= {name: "BOOL" for name in ("return_num_input_tokens", "return_num_output_tokens")}
OUTPUTS = {"text_output": "BYTES", "num_input_tokens": "UINT32", "num_output_tokens": "UINT32"}


@dataclass
class Script:
    """What happens to one request.

    Attributes:
        ttft_s: from the request to the first chunk.
        itl_s: between chunks.
        chunks: tokens of each; their sum is the answer's length.
        error: sent in place of the rest, after the chunks; a whole answer is refused with it.
        status: of HTTP; other than 200 the error comes at once, over gRPC as UNAVAILABLE.
    """

    ttft_s: float = 0.0
    itl_s: float = 0.0
    chunks: tuple[int, ...] = (1, 1, 1, 1)
    error: str | None = None
    status: int = 200


@dataclass
class Seen:
    """One request as the server saw it. Times in nanoseconds of `time.perf_counter_ns`."""

    came_ns: int
    request: dict[str, Any]
    left_ns: list[int] = field(default_factory=list)


class FakeLlm:
    """Answers request number n (from 0) as `script(n)` says.

    Attributes:
        per_chunk_usage: SSE chunks say how many tokens there were so far.
    """

    def __init__(self) -> None:
        self.script: Callable[[int], Script] = lambda number: Script()
        self.per_chunk_usage = True
        self.seen: list[Seen] = []
        self.http = self.grpc = ""

    async def play(self, script: Script, seen: Seen) -> AsyncIterator[int]:
        """The number of tokens of each chunk, when it is due."""
        await asyncio.sleep(script.ttft_s)
        for index, tokens in enumerate(script.chunks):
            if index:
                await asyncio.sleep(script.itl_s)
            seen.left_ns.append(time.perf_counter_ns())
            yield tokens

    def enter(self, request: dict[str, Any]) -> tuple[Script, Seen]:
        seen = Seen(time.perf_counter_ns(), request)
        self.seen.append(seen)
        return self.script(len(self.seen) - 1), seen


async def serve_http(fake: FakeLlm, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One connection of the OpenAI API."""
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            fields = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:-2])
            body = await reader.readexactly(int(fields.get("content-length", 0)))
            if head.startswith("GET"):
                _answer(writer, 200, {"data": [{"id": "fake"}, {"id": "other"}]})
            else:
                await _complete(fake, head.split(" ")[1], json.loads(body), writer)
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


async def _complete(fake: FakeLlm, path: str, request: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    script, seen = fake.enter({**request, "path": path})
    if script.status != 200:
        return _answer(writer, script.status, {"error": {"message": script.error, "type": "overloaded"}})
    usage = {"prompt_tokens": 7, "prompt_tokens_details": {"cached_tokens": 3}}
    if not request.get("stream"):
        total = sum([tokens async for tokens in fake.play(script, seen)])
        return _answer(writer, 200, {"choices": [{"text": "x"}], "usage": {**usage, "completion_tokens": total}})
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
    chat, total = path.endswith("chat/completions"), 0
    if chat:
        _event(writer, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
    async for tokens in fake.play(script, seen):
        total += tokens
        content = {"delta": {"content": "é\n\n"}} if chat else {"text": "é\n\n"}
        so_far = {"usage": {**usage, "completion_tokens": total}} if fake.per_chunk_usage else {}
        _event(writer, {"choices": [content], **so_far})
        await writer.drain()
    if script.error is not None:
        _event(writer, {"error": {"message": script.error, "code": 500}})
    else:
        _event(writer, {"choices": [{"text": "", "finish_reason": "length"}]})
        _event(writer, {"choices": [], "usage": {**usage, "completion_tokens": total}})
    _write_chunk(writer, b"data: [DONE]\n\n")
    writer.write(b"0\r\n\r\n")


def _event(writer: asyncio.StreamWriter, document: dict[str, Any]) -> None:
    """One event, cut in two chunks of HTTP: a reader must put them together."""
    data = b"data: " + json.dumps(document, ensure_ascii=False).encode() + b"\n\n"
    _write_chunk(writer, data[:11])
    _write_chunk(writer, data[11:])


def _write_chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))


def _answer(writer: asyncio.StreamWriter, status: int, document: dict[str, Any]) -> None:
    body = json.dumps(document).encode()
    head = f"HTTP/1.1 {status} Text\r\nServer: fake\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    writer.write(head.encode() + b"\r\n\r\n" + body)


class FakeTriton(service_pb2_grpc.GRPCInferenceServiceServicer):
    """As much of Triton's service as a load on a language model needs."""

    def __init__(self, fake: FakeLlm) -> None:
        self._fake = fake

    async def ServerMetadata(self, request: Any, context: Any) -> Any:
        return service_pb2.ServerMetadataResponse(name="fake-triton", version="0")

    async def ModelMetadata(self, request: Any, context: Any) -> Any:
        if request.name != "fake":
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown")
        answer = service_pb2.ModelMetadataResponse(name="fake", versions=["1"])
        for tensors, found in ((INPUTS, answer.inputs), (OUTPUTS, answer.outputs)):
            for name, datatype in tensors.items():
                found.add(name=name, datatype=datatype, shape=[-1])
        return answer

    async def ModelConfig(self, request: Any, context: Any) -> Any:
        return service_pb2.ModelConfigResponse(config=model_config_pb2.ModelConfig(name="fake", backend="llm"))

    async def ModelStatistics(self, request: Any, context: Any) -> Any:
        answer = service_pb2.ModelStatisticsResponse()
        for name in ("fake", "other"):
            answer.model_stats.add(name=name)
        return answer

    async def ModelStreamInfer(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        async for message in request_iterator:
            tensors = zip(message.inputs, message.raw_input_contents, strict=True)
            inputs: dict[str, Any] = {tensor.name: content for tensor, content in tensors}
            inputs["sampling_parameters"] = json.loads(inputs["sampling_parameters"][4:])
            script, seen = self._fake.enter(inputs)
            if script.status != 200:
                await context.abort(grpc.StatusCode.UNAVAILABLE, script.error)
            async for tokens in self._fake.play(script, seen):
                yield _response(tokens, b"text")
            if script.error is not None:
                yield service_pb2.ModelStreamInferResponse(error_message=script.error)
            else:
                yield _response(0, b"")  # FINAL


def _response(tokens: int, text: bytes) -> Any:
    answer = service_pb2.ModelStreamInferResponse()
    values = {"text_output": len(text).to_bytes(4, "little") + text, "num_input_tokens": np.uint32(7).tobytes()}
    values["num_output_tokens"] = np.uint32(tokens).tobytes()
    for name, content in values.items():
        answer.infer_response.outputs.add(name=name, datatype=OUTPUTS[name], shape=[1])
        answer.infer_response.raw_output_contents.append(content)
    return answer


@contextmanager
def run_fake_llm() -> Iterator[FakeLlm]:
    """A fake model in a thread of its own, gone at the end."""
    fake, ready = FakeLlm(), threading.Event()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        http = await asyncio.start_server(lambda r, w: serve_http(fake, r, w), "127.0.0.1", 0)
        fake.http = f"127.0.0.1:{http.sockets[0].getsockname()[1]}"
        rpc = grpc.aio.server()
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(FakeTriton(fake), rpc)
        fake.grpc = f"127.0.0.1:{rpc.add_insecure_port('127.0.0.1:0')}"
        await rpc.start()
        ready.set()
        await stop.wait()
        http.close()
        await rpc.stop(None)

    def run() -> None:
        loop.run_until_complete(serve())
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    assert ready.wait(30)
    try:
        yield fake
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
