"""Chat and completions: from a checked request to what is sent, whole or as a stream."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from starlette.responses import Response

from clients.async_grpc import AsyncGrpcClient
from clients.errors import ClientError, Overloaded
from clients.generation import Chunk
from clients.openai_server.answers import Usage
from clients.openai_server.chat import ChatStream, chat_response
from clients.openai_server.completions import CompletionStream, Echo, completion_response, without_tokens
from clients.openai_server.errors import ApiError, error_from_client
from clients.openai_server.front import Scope, Send
from clients.openai_server.models import LanguageModel, Models
from clients.openai_server.prompts import Prompt, chat_prompt, completion_prompts
from clients.openai_server.request_record import RequestRecord, record_of
from clients.openai_server.sampling import COMPLETION_FIELDS, chat_fields, chat_sampling, completion_sampling
from clients.openai_server.schemas import ChatRequest, CompletionRequest, NamedTool, Sampling
from clients.openai_server.tool_calls import HermesParser, NamedParser, RequiredParser, ToolParser
from clients.openai_server.turns import Turns
from clients.openai_server.work import Work, all_or_none, merged

Result = TypeVar("Result")
_PROMPTS_AT_ONCE = 32  # of one request; others wait their turn here and not in the engine's queue
_EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx holds responses back until they are complete, if it is not told
]


class Stream(Protocol):
    """Makes the events of one request: `ChatStream` or `CompletionStream`, with the prompt's number bound."""

    @property
    def usage(self) -> Usage: ...

    def start(self) -> bytes: ...

    def finish(self) -> bytes: ...


@dataclass(frozen=True)
class Prepared:
    """A request that is ready to be sent: one prompt with all that goes beside it.

    Attributes:
        timeout_s: the deadline that the client gave.
        fields: what the client calls the engine's fields, where that is something else.
    """

    model: LanguageModel
    prompt: Prompt
    sampling: Mapping[str, Any]
    tensors: Mapping[str, Any]
    timeout_s: float | None
    fields: Mapping[str, str]

    @property
    def n(self) -> int:
        return int(self.sampling.get("n", 1))

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments of `AsyncGrpcClient.astream` and `generate`."""
        return {
            "model": self.model.name,
            "prompt": self.prompt.token_ids,
            "version": self.model.version,
            "request_id": uuid.uuid4().hex,
            "timeout_s": self.timeout_s,
            "tensors": self.tensors,
            **self.sampling,
        }


@dataclass(frozen=True)
class Generations:
    """Answers requests of language models.

    Args:
        executor: for templates and tokenizers, off the event loop.
        request_s: until an answer must be complete.
    """

    triton: AsyncGrpcClient
    models: Models
    executor: ThreadPoolExecutor
    request_s: float

    def chat(self, request: ChatRequest, scope: Scope) -> Response:
        return Work(partial(self._chat, request, record_of(scope)), self.request_s)

    def completion(self, request: CompletionRequest, scope: Scope) -> Response:
        return Work(partial(self._completion, request, record_of(scope)), self.request_s)

    async def _chat(self, request: ChatRequest, record: RequestRecord, send: Send) -> None:
        sampling = chat_sampling(request)
        model = await self.models.language_model(request.model)
        prompt = await self._in_thread(partial(chat_prompt, model, request))
        prepared = _prepared(model, request, sampling, prompt, chat_fields(request))
        num_top = (request.top_logprobs or 0) if request.logprobs else None
        new_parser = _parser_maker(request, prompt)
        answer_id, created = f"chatcmpl-{uuid.uuid4().hex}", int(time.time())
        record.model = model.name
        if not request.stream:
            answers = (await self._whole([prepared]))[0]
            body = chat_response(answer_id, created, model.name, answers, num_top=num_top, new_parser=new_parser)
            return await _send_json(send, record, body)
        stream = ChatStream(
            answer_id,
            created,
            model.name,
            prepared.n,
            num_top=num_top,
            include_usage=_include_usage(request),
            parsers=[new_parser() for _ in range(prepared.n)] if new_parser else (),
        )
        chunks = self._chunks([prepared])
        await _send_stream(send, record, stream, lambda prompt, chunk: stream.update(chunk), chunks)

    async def _completion(self, request: CompletionRequest, record: RequestRecord, send: Send) -> None:
        sampling = completion_sampling(request)
        model = await self.models.language_model(request.model)
        if "prompt_logprobs" in sampling and not model.has_prompt_logprobs:
            raise ApiError(400, f"the model {model.name!r} gives no log probabilities of a prompt", param="echo")
        prompts = await self._in_thread(partial(completion_prompts, model, request))
        prepared = [_prepared(model, request, sampling, prompt, COMPLETION_FIELDS) for prompt in prompts]
        echoes = [_echo(model, prompt) if request.echo else Echo() for prompt in prompts]
        answer_id, created = f"cmpl-{uuid.uuid4().hex}", int(time.time())
        record.model = model.name
        if not request.stream:
            answers = await self._whole(prepared)
            if request.max_tokens == 0:
                answers = [[without_tokens(answer) for answer in to_prompt] for to_prompt in answers]
            body = completion_response(answer_id, created, model.name, answers, echoes=echoes, num_top=request.logprobs)
            return await _send_json(send, record, body)
        stream = CompletionStream(
            answer_id,
            created,
            model.name,
            prepared[0].n,
            echoes=[echo.text for echo in echoes],
            num_top=request.logprobs,
            include_usage=_include_usage(request),
        )
        await _send_stream(send, record, stream, stream.update, self._chunks(prepared))

    async def _whole(self, requests: Sequence[Prepared]) -> list[Sequence[Chunk]]:
        """Returns the answers to each prompt."""
        turns = Turns(min(_PROMPTS_AT_ONCE, len(requests)))

        async def one(request: Prepared) -> Sequence[Chunk]:
            while True:
                await turns.begin()
                try:
                    return (await self.triton.generate(**request.arguments())).answers
                except ClientError as error:
                    if not (isinstance(error, Overloaded) and turns.fewer()):
                        raise error_from_client(error, request.fields) from None
                finally:
                    turns.end()

        return await all_or_none([one(request) for request in requests])

    def _chunks(self, requests: Sequence[Prepared]) -> AsyncGenerator[tuple[int, Chunk]]:
        turns = Turns(min(_PROMPTS_AT_ONCE, len(requests)))
        return merged([self._stream(number, request, turns) for number, request in enumerate(requests)])

    async def _stream(self, number: int, request: Prepared, turns: Turns) -> AsyncGenerator[tuple[int, Chunk]]:
        """Yields an answer's chunks with the number of its prompt; ending the iteration early cancels the request."""
        has_begun = False
        while True:
            await turns.begin()
            try:
                async with self.triton.astream(**request.arguments()) as chunks:
                    async for chunk in chunks:
                        has_begun = True
                        yield number, chunk
                return
            except ClientError as error:
                if has_begun or not (isinstance(error, Overloaded) and turns.fewer()):
                    raise error_from_client(error, request.fields) from None
            finally:
                turns.end()

    def _in_thread(self, work: Callable[[], Result]) -> Awaitable[Result]:
        return asyncio.get_running_loop().run_in_executor(self.executor, work)


def _prepared(
    model: LanguageModel, request: Sampling, sampling: Mapping[str, Any], prompt: Prompt, fields: Mapping[str, str]
) -> Prepared:
    # Our own limit is no deadline for the engine, which refuses what by its estimate cannot be there in time.
    deadline_s = None if request.deadline_ms is None else request.deadline_ms / 1e3
    tensors = {"priority": request.priority, "client": request.user, "cache_salt": request.cache_salt}
    return Prepared(model, prompt, sampling, tensors, deadline_s, fields)


def _echo(model: LanguageModel, prompt: Prompt) -> Echo:
    first = [*prompt.token_ids[:1]]
    return Echo(prompt.text, model.tokenizer.decode(first, skip_special_tokens=False))


def _parser_maker(request: ChatRequest, prompt: Prompt) -> Callable[[], ToolParser] | None:
    """Returns what makes the parser of an answer, where it may hold tool calls."""
    if not request.tools or request.tool_choice == "none":
        return None
    if isinstance(request.tool_choice, NamedTool):
        return partial(NamedParser, request.tool_choice.function.name, _call_id)
    if request.tool_choice == "required":
        return partial(RequiredParser, _call_id)
    names = frozenset(tool.function.name for tool in request.tools)
    single = request.parallel_tool_calls is False
    return partial(HermesParser, names, _call_id, single=single) if prompt.is_hermes else None


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def _include_usage(request: Sampling) -> bool:
    return bool(request.stream_options and request.stream_options.include_usage)


async def _send_stream(
    send: Send,
    record: RequestRecord,
    stream: Stream,
    events: Callable[[int, Chunk], bytes],
    chunks: AsyncGenerator[tuple[int, Chunk]],
) -> None:
    """Sends events as they come. Nothing is sent before the first: until then an error has a status of its own."""
    async with aclosing(chunks) as all_chunks:
        async for prompt, chunk in all_chunks:
            data = events(prompt, chunk)
            if not record.is_stream:
                record.note_first_token()
                await send({"type": "http.response.start", "status": 200, "headers": list(_EVENT_STREAM)})
                record.is_stream = True
                data = stream.start() + data
            record.usage = stream.usage
            if data:
                await send({"type": "http.response.body", "body": data, "more_body": True})
    await send({"type": "http.response.body", "body": stream.finish()})


async def _send_json(send: Send, record: RequestRecord, data: dict[str, Any]) -> None:
    used = data["usage"]
    cached = used["prompt_tokens_details"]["cached_tokens"]
    record.usage = Usage(used["prompt_tokens"], used["completion_tokens"], cached)
    body = json.dumps(data, separators=(",", ":")).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})
