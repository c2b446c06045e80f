"""`TritonClient`: what the clients for threads offer over both protocols; a connection for each thread.

Knows nothing of gRPC or HTTP: `clients/grpc.py` and `clients/http.py` say how a call is made.
"""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, ClassVar, TypeVar

from clients.core import ClientCore
from clients.errors import ClientClosed, ClientError, DeadlineExceeded, InputError, ServerError, ServerUnavailable
from clients.generation import GenerateOptions, Generation, Prompt, generate_request
from clients.protocol import Arrays, Call, Json, Protocol
from clients.requests import InferRequest, InputValue, Outputs, build_request
from clients.retries import NO_RETRIES, Attempts, RetryPolicy
from clients.shared_memory import UNREGISTER_WAITS_S, SharedBlock, SharedRegion, is_in_use
from clients.streams import Source, TextStream, whole_answer
from clients.types import ModelMetadata, metadata_from_json
from clients.watch import Model, Watcher

Self = TypeVar("Self", bound="TritonClient")
Answer = TypeVar("Answer")


class TritonClient(ClientCore, ABC):
    """A client of one server. Share it between threads freely; close it once.

    Args:
        url: `host:port`; `http://` or `grpc://` in front is dropped.
        timeout_s: seconds that one call may take, connecting and trying again included.
        retries: when a call that failed is made again.
    """

    _protocol: ClassVar[Protocol]

    def __init__(self, url: str, timeout_s: float = 60.0, retries: RetryPolicy | None = None) -> None:
        super().__init__(url, timeout_s, retries)
        self._lock = threading.Lock()
        # Connections are not to be shared between threads (k01): each thread gets its own. Nor with a process that is
        # forked, whose thread is the same object: both would read each other's answers from one socket.
        self._connections: dict[tuple[int, threading.Thread], Any] = {}
        self._watcher = Watcher(self._may_serve)

    def config(self, model: str, version: str = "") -> Json:
        """The model's configuration, as the JSON form of Triton's `ModelConfig`."""
        return self._run(self._protocol.config(model, version))

    def statistics(self, model: str, version: str = "") -> list[Json]:
        """Triton's counters, one entry for each version of `model` that is loaded; "" stands for all models."""
        return self._run(self._protocol.statistics(model, version))

    def server_metadata(self) -> Json:
        """The server's name, version and extensions."""
        return self._run(self._protocol.server_metadata())

    def model_names(self) -> list[str]:
        """Names of the models that are loaded."""
        return self._run(self._protocol.model_names())

    def metadata(self, model: str, version: str = "") -> ModelMetadata:
        """Inputs and outputs of `model`, asked for once and remembered.

        Raises:
            ServerError: the server has no such model or version.
            ServerUnavailable: no server answers.
        """
        remembered = self._metadata.get((model, version))
        return remembered if remembered is not None else self._ask_metadata((model, version), self.timeout_s)

    def is_ready(self) -> bool:
        """True when the server answers and says it is ready; False when it does not, or is not there."""
        try:
            return self._run(self._protocol.server_ready(), retries=NO_RETRIES)
        except (ServerUnavailable, ServerError):
            return False

    def model_ready(self, name: str, version: str = "") -> bool:
        """True when the model can serve; False when it cannot, or is unknown.

        Raises:
            ServerUnavailable: no server answers.
        """
        try:
            return self._run(self._protocol.model_ready(name, version), retries=NO_RETRIES)
        except ServerError:
            return False

    def infer(
        self,
        model: str,
        inputs: Mapping[str, InputValue],
        *,
        version: str = "",
        outputs: Outputs | None = None,
        timeout_s: float | None = None,
        request_id: str = "",
    ) -> Arrays:
        """Run the model once.

        Args:
            model: model name.
            inputs: arrays, lists or scalars by input name (see `clients.types.check_inputs`), `EncodedBytes`, or
                `SharedTensor`s of `shared_memory`.
            version: "" lets the server choose by its version policy.
            outputs: names of the outputs wanted; None means all. A mapping says of each where in shared memory the
                server writes it, or None.
            timeout_s: seconds for this call, in place of the client's own. It travels with the request: a queue
                drops what nobody waits for any more, where the model's queue policy allows it.
            request_id: comes back in the server's log and traces.

        Returns:
            Arrays by output name. BYTES outputs are object arrays of bytes.

        Raises:
            InputError: the request does not fit the model; nothing was sent.
            DeadlineExceeded: the timeout passed.
            ServerError: the server refused or failed it.
            ServerUnavailable: no server answers.
        """
        attempts = self._attempts(timeout_s, None, repeatable=False)

        def build(metadata: ModelMetadata) -> InferRequest:
            left_s = attempts.next_s()
            return build_request(metadata, inputs, outputs, version=version, request_id=request_id, timeout_s=left_s)

        request = self._fitting((model, version), attempts, build)
        return self._run(self._protocol.infer(request), attempts)

    def generate(
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
        """The whole answer of a language model.

        Args:
            model: model name.
            prompt: text, or token ids, which are taken as they are.
            version, request_id: as for `infer`.
            timeout_s: the server refuses what it cannot answer in that time, and ends what turns out to be late with
                what there is and the finish reason "deadline". Without it there is no limit but 10 minutes.
            token_ids: the answer's tokens are wanted, too.
            tensors: more of the model's inputs by name, such as `priority`, `client` or `cache_salt`.
            sampling: `max_tokens`, `temperature`, `stop`, `n`, `logprobs` and all other fields of `SamplingParams`;
                None stands for the default, as it does in `tensors`.

        Raises:
            InputError: it cannot be sent; nothing was.
            InvalidRequest, ContextLengthExceeded: the model refused it.
            Overloaded: its queue is full; nothing was begun.
            DeadlineExceeded: no answer in time.
            EngineFailed: the model failed.
            StreamBroken: the server or the connection ended before the answer.
            ServerUnavailable: no server answers.
        """
        options = GenerateOptions(version, request_id, timeout_s, token_ids, tensors)
        with self._text_stream(model, prompt, sampling, options, stream=False) as stream:
            return whole_answer(list(stream))

    def stream(
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
    ) -> TextStream:
        """The answer of a language model as it comes; arguments and errors are those of `generate`.

        `break`, an error in the loop and `close` end the answer on the server. Nothing is sent before the first chunk
        is asked for. Any number of streams may be open at once; each belongs to the thread that reads it.

        Returns:
            An iterator of `Chunk`s; the last one of each answer has its finish reason and usage.
        """
        options = GenerateOptions(version, request_id, timeout_s, token_ids, tensors)
        return self._text_stream(model, prompt, sampling, options, stream=True)

    def shared_memory(self, byte_size: int) -> SharedRegion:
        """A region of shared memory that the server knows: tensors in it are not sent. Use it with `with`, or close it.

        Raises:
            SharedMemoryError: there is no room for it, or the server cannot reach it: it must run on the same host.
        """
        return SharedRegion(self, byte_size)

    def close(self) -> None:
        """Close every thread's connection. A second call does nothing; a later request raises."""
        with self._lock:
            self._closed = True
            self._watcher.close()
            connections, self._connections = self._connections, {}
        for connection in connections.values():
            connection.close()

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @abstractmethod
    def _connect(self) -> Any:
        """A new connection, to be used by one thread. It has `close()` and opens no socket yet."""

    @abstractmethod
    def _send(self, call: Call[Any], timeout_s: float) -> Any:
        """Make one attempt and return what came back, for the call to parse."""

    @abstractmethod
    def _start(self, request: InferRequest, timeout_s: float) -> Source:
        """Send a request that has many responses."""

    def _run(
        self, call: Call[Answer], attempts: Attempts | None = None, *, retries: RetryPolicy | None = None
    ) -> Answer:
        attempts = attempts or self._attempts(None, retries, repeatable=call.repeatable)
        while True:
            try:
                answer = call.parse(self._send(call, attempts.next_s()))
            except ClientError as error:
                time.sleep(attempts.wait_s(error))
            else:
                attempts.succeeded()
                return answer

    def _text_stream(
        self, model: str, prompt: Prompt, sampling: Mapping[str, Any], options: GenerateOptions, *, stream: bool
    ) -> TextStream:
        def build(metadata: ModelMetadata) -> InferRequest:
            return generate_request(metadata, prompt, sampling, options, stream=stream)

        def prepare(attempts: Attempts) -> InferRequest:
            return self._fitting((model, options.version), attempts, build)

        attempts = self._attempts_to_generate(options)
        return TextStream(self.url, (model, options.version), attempts, self._watcher, prepare, self._start)

    def _fitting(
        self, model: Model, attempts: Attempts, build: Callable[[ModelMetadata], InferRequest]
    ) -> InferRequest:
        """The request that `build` makes of what a model takes. Where it does not fit what is remembered of the model,
        the server is asked again: it may serve another version by now.
        """
        remembered = self._metadata.get(model)
        if remembered is None:
            return build(self._ask_metadata(model, attempts.next_s()))
        try:
            return build(remembered)
        except InputError:
            try:
                current = self._ask_metadata(model, attempts.next_s())
            except ClientError:
                current = remembered
            if current == remembered:
                raise
        return build(current)

    def _ask_metadata(self, model: Model, limit_s: float) -> ModelMetadata:
        attempts = self._attempts(limit_s, None, repeatable=True)
        answer = self._run(self._protocol.model_metadata(*model), attempts)
        # Only the config tells which inputs are optional, and whether the first dimension is a batch.
        config = self._run(self._protocol.config(*model), attempts)
        found = self._metadata[model] = metadata_from_json(answer, config)
        return found

    def _may_serve(self, model: Model) -> bool:
        """False where the server says that a model is not ready; silence says nothing."""
        try:
            return self._run(self._protocol.model_ready(*model), retries=NO_RETRIES)
        except (DeadlineExceeded, ServerUnavailable):
            return True
        except ServerError:
            return False

    def _register(self, block: SharedBlock) -> None:
        self._run(self._protocol.register_region(block.name, block.key, block.byte_size))

    def _unregister(self, block: SharedBlock) -> None:
        for wait_s in (*UNREGISTER_WAITS_S, None):
            try:
                return self._run(self._protocol.unregister_region(block.name))
            except ServerUnavailable:
                return None  # a server that is gone knows no regions
            except ServerError as error:
                if wait_s is None or not is_in_use(error):
                    raise
                time.sleep(wait_s)

    def _connection(self) -> Any:
        """This thread's connection; those of threads that have ended are closed on the way."""
        key = os.getpid(), threading.current_thread()
        connection = self._connections.get(key)
        if connection is not None:
            return connection
        with self._lock:
            if self._closed:
                raise ClientClosed(self.url)
            ended = [other for other in self._connections if other[0] != key[0] or not other[1].is_alive()]
            stale = [self._connections.pop(other) for other in ended]
            connection = self._connections[key] = self._connect()
        for old in stale:
            old.close()
        return connection
