"""Chat and completions: from a checked request to what is sent, whole or as a stream."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from starlette.responses import Response

from clients.openai_server.answers import Usage
from clients.openai_server.body import ClientGone
from clients.openai_server.chat import ChatStream, chat_response
from clients.openai_server.completions import CompletionStream, completion_response
from clients.openai_server.errors import internal_error
from clients.openai_server.front import Receive, Scope, Send
from clients.openai_server.generation import Generation, Update, generate
from clients.openai_server.models import LanguageModel, Models
from clients.openai_server.prompts import Prompt, chat_prompt, completion_prompts
from clients.openai_server.request_record import RequestRecord, record_of
from clients.openai_server.sampling import chat_sampling, completion_sampling, options
from clients.openai_server.schemas import ChatRequest, CompletionRequest, NamedTool, Sampling
from clients.openai_server.tool_calls import HermesParser, NamedParser, RequiredParser, ToolParser
from clients.openai_server.triton import Triton

Result = TypeVar("Result")
_PROMPTS_AT_ONCE = 32  # of one request; others wait their turn here and not in the engine's queue
_EVENT_STREAM = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class Work(Response):
    """A response whose making is cancelled, and with it what Triton computes, when its client goes."""

    def __init__(self, work: Callable[[Send], Coroutine[Any, Any, None]]) -> None:
        self._work = work
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await unless_gone(receive, self._work(send))


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Runs work to its end, or cancels it when the client closes the connection.

    Raises:
        ClientGone: the client closed it first.
    """
    task = asyncio.create_task(work)
    watch = asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        watch.cancel()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class Stream(Protocol):
    """Makes the events of one request: `ChatStream` or `CompletionStream`, with the prompt's number bound."""

    @property
    def usage(self) -> Usage: ...

    def start(self) -> bytes: ...

    def finish(self) -> bytes: ...


@dataclass(frozen=True)
class Generations:
    """Answers requests of language models.

    Args:
        executor: for templates and tokenizers, off the event loop.
        request_s: until an answer must be complete.
    """

    triton: Triton
    models: Models
    executor: ThreadPoolExecutor
    request_s: float

    def chat(self, request: ChatRequest, scope: Scope) -> Response:
        return Work(partial(self._chat, request, record_of(scope)))

    def completion(self, request: CompletionRequest, scope: Scope) -> Response:
        return Work(partial(self._completion, request, record_of(scope)))

    async def _chat(self, request: ChatRequest, record: RequestRecord, send: Send) -> None:
        sampling = chat_sampling(request)
        model = await self.models.language_model(request.model)
        prompt = await self._in_thread(partial(chat_prompt, model, request))
        generation = _generation(model, request, sampling, prompt)
        num_top = (request.top_logprobs or 0) if request.logprobs else None
        new_parser = _parser_maker(request, prompt)
        answer_id, created = f"chatcmpl-{uuid.uuid4().hex}", int(time.time())
        record.model = model.name
        updates = self._updates([generation])
        if not request.stream:
            update = (await _whole(updates, 1, record))[0]
            body = chat_response(answer_id, created, model.name, update, num_top=num_top, new_parser=new_parser)
            return await _send_json(send, body)
        stream = ChatStream(
            answer_id,
            created,
            model.name,
            generation.n,
            num_top=num_top,
            include_usage=_include_usage(request),
            parsers=[new_parser() for _ in range(generation.n)] if new_parser else (),
        )
        await _send_stream(send, record, stream, lambda prompt, update: stream.update(update), updates)

    async def _completion(self, request: CompletionRequest, record: RequestRecord, send: Send) -> None:
        sampling = completion_sampling(request)
        model = await self.models.language_model(request.model)
        prompts = await self._in_thread(partial(completion_prompts, model, request))
        generations = [_generation(model, request, sampling, prompt) for prompt in prompts]
        echoes = [prompt.text if request.echo else "" for prompt in prompts]
        answer_id, created = f"cmpl-{uuid.uuid4().hex}", int(time.time())
        record.model = model.name
        updates = self._updates(generations)
        if not request.stream:
            found = await _whole(updates, len(prompts), record)
            body = completion_response(answer_id, created, model.name, found, echoes=echoes, num_top=request.logprobs)
            return await _send_json(send, body)
        stream = CompletionStream(
            answer_id,
            created,
            model.name,
            generations[0].n,
            echoes=echoes,
            num_top=request.logprobs,
            include_usage=_include_usage(request),
        )
        await _send_stream(send, record, stream, stream.update, updates)

    def _updates(self, generations: Sequence[Generation]) -> AsyncIterator[tuple[int, Update]]:
        return _merged([generate(self.triton, generation, self.request_s) for generation in generations])

    def _in_thread(self, work: Callable[[], Result]) -> Awaitable[Result]:
        return asyncio.get_running_loop().run_in_executor(self.executor, work)


def _generation(model: LanguageModel, request: Sampling, sampling: dict[str, Any], prompt: Prompt) -> Generation:
    return Generation(
        model=model.name,
        version=model.version,
        request_id=uuid.uuid4().hex,
        input_ids=prompt.token_ids,
        sampling=sampling,
        stream=bool(request.stream),
        logprobs="logprobs" in sampling,
        options=options(request),
    )


def _parser_maker(request: ChatRequest, prompt: Prompt) -> Callable[[], ToolParser] | None:
    """Returns what makes the parser of an answer, where it may hold tool calls."""
    if not request.tools or request.tool_choice == "none":
        return None
    if isinstance(request.tool_choice, NamedTool):
        return partial(NamedParser, request.tool_choice.function.name, _call_id)
    if request.tool_choice == "required":
        return partial(RequiredParser, _call_id)
    names = frozenset(tool.function.name for tool in request.tools)
    return partial(HermesParser, names, _call_id) if prompt.is_hermes else None


def _call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def _include_usage(request: Sampling) -> bool:
    return bool(request.stream_options and request.stream_options.include_usage)


async def _merged(sources: Sequence[AsyncIterator[Update]]) -> AsyncIterator[tuple[int, Update]]:
    """Yields what any of the sources yields, with its number; the first error ends all."""
    if len(sources) == 1:
        async with aclosing(sources[0]) as only:  # type: ignore[type-var]
            async for update in only:
                yield 0, update
        return
    queue: asyncio.Queue[tuple[int, Update] | BaseException | None] = asyncio.Queue()

    turns = asyncio.Semaphore(_PROMPTS_AT_ONCE)

    async def pump(number: int, source: AsyncIterator[Update]) -> None:
        try:
            async with turns, aclosing(source) as updates:  # type: ignore[type-var]
                async for update in updates:
                    queue.put_nowait((number, update))
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(pump(number, source)) for number, source in enumerate(sources)]
    try:
        running = len(tasks)
        while running:
            found = await queue.get()
            if found is None:
                running -= 1
            elif isinstance(found, BaseException):
                raise found
            else:
                yield found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _whole(updates: AsyncIterator[tuple[int, Update]], num_prompts: int, record: RequestRecord) -> list[Update]:
    """Returns the one response to each prompt."""
    found: dict[int, Update] = {}
    async with aclosing(updates) as all_updates:  # type: ignore[type-var]
        async for prompt, update in all_updates:
            found[prompt] = update
    record.usage = sum((Usage.of(update) for update in found.values()), Usage())
    record.note_first_token()
    if len(found) < num_prompts:
        raise internal_error("a stream ended without a response")
    return [found[prompt] for prompt in range(num_prompts)]


async def _send_stream(
    send: Send,
    record: RequestRecord,
    stream: Stream,
    events: Callable[[int, Update], bytes],
    updates: AsyncIterator[tuple[int, Update]],
) -> None:
    """Sends events as they come. Nothing is sent before the first: until then an error has a status of its own."""
    async with aclosing(updates) as all_updates:  # type: ignore[type-var]
        async for prompt, update in all_updates:
            data = events(prompt, update)
            if not record.is_stream:
                record.note_first_token()
                await send({"type": "http.response.start", "status": 200, "headers": list(_EVENT_STREAM)})
                record.is_stream = True
                data = stream.start() + data
            record.usage = stream.usage
            if data:
                await send({"type": "http.response.body", "body": data, "more_body": True})
    await send({"type": "http.response.body", "body": stream.finish()})


async def _send_json(send: Send, data: dict[str, Any]) -> None:
    body = json.dumps(data, separators=(",", ":")).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})
