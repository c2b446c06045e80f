"""`AsyncTritonClient`: what both protocols' clients for asyncio offer; the same calls as `clients/base.py` has."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, ClassVar, TypeVar

from clients.async_streams import AsyncSource, AsyncTextStream
from clients.core import ClientCore
from clients.errors import ClientError, DeadlineExceeded, InputError, ServerError, ServerUnavailable
from clients.generation import GenerateOptions, Generation, Prompt, generate_request
from clients.protocol import Arrays, Call, Json, Protocol
from clients.requests import InferRequest, InputValue, Outputs, build_request
from clients.retries import NO_RETRIES, Attempts, RetryPolicy
from clients.shared_memory import UNREGISTER_WAITS_S, AsyncSharedRegion, SharedBlock, is_in_use
from clients.streams import whole_answer
from clients.types import ModelMetadata, metadata_from_json
from clients.watch import AsyncWatcher, Model

Self = TypeVar("Self", bound="AsyncTritonClient")
Answer = TypeVar("Answer")


class AsyncTritonClient(ClientCore, ABC):
    """A client of one server for one event loop. Any number of calls may be under way at once; close it once.

    Arguments, answers and errors are those of `clients.base.TritonClient`. A task that is cancelled cancels its call,
    on the server too.
    """

    _protocol: ClassVar[Protocol]

    def __init__(self, url: str, timeout_s: float = 60.0, retries: RetryPolicy | None = None) -> None:
        super().__init__(url, timeout_s, retries)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watcher = AsyncWatcher(self._may_serve)
        self._asking = asyncio.Lock()

    async def config(self, model: str, version: str = "") -> Json:
        """The model's configuration, as the JSON form of Triton's `ModelConfig`."""
        return await self._run(self._protocol.config(model, version))

    async def statistics(self, model: str, version: str = "") -> list[Json]:
        """Triton's counters, one entry for each version of `model` that is loaded; "" stands for all models."""
        return await self._run(self._protocol.statistics(model, version))

    async def server_metadata(self) -> Json:
        """The server's name, version and extensions."""
        return await self._run(self._protocol.server_metadata())

    async def model_names(self) -> list[str]:
        """Names of the models that are loaded."""
        return await self._run(self._protocol.model_names())

    async def metadata(self, model: str, version: str = "") -> ModelMetadata:
        """Inputs and outputs of `model`, asked for once and remembered."""
        return await self._describe((model, version), None, self.timeout_s)

    async def is_ready(self) -> bool:
        """True when the server answers and says it is ready; False when it does not, or is not there."""
        try:
            return await self._run(self._protocol.server_ready(), retries=NO_RETRIES)
        except (ServerUnavailable, ServerError):
            return False

    async def model_ready(self, name: str, version: str = "") -> bool:
        """True when the model can serve; False when it cannot, or is unknown."""
        try:
            return await self._run(self._protocol.model_ready(name, version), retries=NO_RETRIES)
        except ServerError:
            return False

    async def infer(
        self,
        model: str,
        inputs: Mapping[str, InputValue],
        *,
        version: str = "",
        outputs: Outputs | None = None,
        timeout_s: float | None = None,
        request_id: str = "",
    ) -> Arrays:
        """Run the model once; see `TritonClient.infer`."""
        attempts = self._attempts(timeout_s, None, repeatable=False)

        def build(metadata: ModelMetadata) -> InferRequest:
            left_s = attempts.next_s()
            return build_request(metadata, inputs, outputs, version=version, request_id=request_id, timeout_s=left_s)

        request = await self._fitting((model, version), attempts, build)
        return await self._run(self._protocol.infer(request), attempts)

    async def generate(
        self,
        model: str,
        prompt: Prompt,
        *,
        version: str = "",
        request_id: str = "",
        timeout_s: float | None = None,
        token_ids: bool = False,
        tensors: Mapping[str, Any] | None = None,
        **sampling: Any,
    ) -> Generation:
        """The whole answer of a language model; see `TritonClient.generate`."""
        options = GenerateOptions(version, request_id, timeout_s, token_ids, tensors)
        async with self._text_stream(model, prompt, sampling, options, stream=False) as stream:
            return whole_answer([chunk async for chunk in stream])

    def astream(
        self,
        model: str,
        prompt: Prompt,
        *,
        version: str = "",
        request_id: str = "",
        timeout_s: float | None = None,
        token_ids: bool = False,
        tensors: Mapping[str, Any] | None = None,
        **sampling: Any,
    ) -> AsyncTextStream:
        """The answer of a language model as it comes; see `TritonClient.stream`.

        `break`, an error in the loop and the end of its task end the answer on the server. Nothing is sent before the
        first chunk is asked for.
        """
        options = GenerateOptions(version, request_id, timeout_s, token_ids, tensors)
        return self._text_stream(model, prompt, sampling, options, stream=True)

    def _text_stream(
        self, model: str, prompt: Prompt, sampling: Mapping[str, Any], options: GenerateOptions, *, stream: bool
    ) -> AsyncTextStream:
        def build(metadata: ModelMetadata) -> InferRequest:
            return generate_request(metadata, prompt, sampling, options, stream=stream)

        async def prepare(attempts: Attempts) -> InferRequest:
            return await self._fitting((model, options.version), attempts, build)

        attempts = self._attempts_to_generate(options)
        return AsyncTextStream(self.url, (model, options.version), attempts, self._watcher, prepare, self._start)

    async def _fitting(
        self, model: Model, attempts: Attempts, build: Callable[[ModelMetadata], InferRequest]
    ) -> InferRequest:
        """As in `TritonClient`."""
        remembered = self._metadata.get(model)
        if remembered is None:
            return build(await self._describe(model, None, attempts.next_s()))
        try:
            return build(remembered)
        except InputError:
            try:
                current = await self._describe(model, remembered, attempts.next_s())
            except ClientError:
                current = remembered
            if current == remembered:
                raise
        return build(current)

    async def _describe(self, model: Model, outdated: ModelMetadata | None, limit_s: float) -> ModelMetadata:
        """What a model takes: remembered, unless it is what the caller has found `outdated`; else asked for."""

        async def ask() -> ModelMetadata:
            async with self._asking:  # a thousand first calls ask once
                found = self._metadata.get(model)
                if found is None or found is outdated:
                    attempts = self._attempts(limit_s, None, repeatable=True)
                    answer = await self._run(self._protocol.model_metadata(*model), attempts)
                    config = await self._run(self._protocol.config(*model), attempts)
                    found = self._metadata[model] = metadata_from_json(answer, config)
                return found

        found = self._metadata.get(model)
        if found is not None and found is not outdated:
            return found
        limit_s = self._limit_s(limit_s)
        try:
            return await asyncio.wait_for(ask(), limit_s)
        except asyncio.TimeoutError as error:
            raise DeadlineExceeded("DEADLINE_EXCEEDED", f"no answer from {self.url} in {limit_s:g} s") from error

    async def _may_serve(self, model: Model) -> bool:
        """False where the server says that a model is not ready; silence says nothing."""
        try:
            return await self._run(self._protocol.model_ready(*model), retries=NO_RETRIES)
        except (DeadlineExceeded, ServerUnavailable):
            return True
        except ServerError:
            return False

    def shared_memory(self, byte_size: int) -> AsyncSharedRegion:
        """A region of shared memory, known to the server within `async with`; see `TritonClient.shared_memory`."""
        return AsyncSharedRegion(self, byte_size)

    async def close(self) -> None:
        """Close every connection. A second call does nothing; a later request raises."""
        self._closed = True
        self._watcher.close()
        await self._close()

    async def __aenter__(self: Self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _register(self, block: SharedBlock) -> None:
        await self._run(self._protocol.register_region(block.name, block.key, block.byte_size))

    async def _unregister(self, block: SharedBlock) -> None:
        for wait_s in (*UNREGISTER_WAITS_S, None):
            try:
                return await self._run(self._protocol.unregister_region(block.name))
            except ServerUnavailable:
                return None  # a server that is gone knows no regions
            except ServerError as error:
                if wait_s is None or not is_in_use(error):
                    raise
                await asyncio.sleep(wait_s)

    def _bind_loop(self) -> None:
        """Connections belong to the event loop in which they are made."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        elif self._loop is not asyncio.get_running_loop():
            raise ClientError("this client belongs to the event loop that used it first; make one for each loop")

    @abstractmethod
    async def _send(self, call: Call[Any], timeout_s: float) -> Any:
        """Make one attempt and return what came back, for the call to parse."""

    @abstractmethod
    async def _start(self, request: InferRequest, timeout_s: float) -> AsyncSource:
        """Send a request that has many responses."""

    @abstractmethod
    async def _close(self) -> None: ...

    async def _run(
        self, call: Call[Answer], attempts: Attempts | None = None, *, retries: RetryPolicy | None = None
    ) -> Answer:
        attempts = attempts or self._attempts(None, retries, repeatable=call.repeatable)
        while True:
            try:
                answer = call.parse(await self._send(call, attempts.next_s()))
            except ClientError as error:
                await asyncio.sleep(attempts.wait_s(error))
            else:
                attempts.succeeded()
                return answer
