"""Service: a language model that takes tensors and answers with tensors; engine, thread and delivery put together."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from backends.llm.engine.engine import LLMEngine
from backends.llm.serving.delivery import Channel, Delivery
from backends.llm.serving.engine_thread import EngineThread
from backends.llm.serving.errors import UNLOADING, response_error
from backends.llm.serving.grammar_queue import GrammarQueue
from backends.llm.serving.metrics import EngineMetrics
from backends.llm.serving.observer import EngineObserver
from backends.llm.serving.options import ServiceOptions
from backends.llm.serving.prompts import PromptEncoder
from backends.llm.serving.requests import ServedRequest, Tensors, cancel_from_tensors, request_from_tensors
from backends.llm.serving.responses import ResponseBuilder
from backends.phases import phase, report
from compiler.errors import ModelkilnError

log = logging.getLogger(__name__)


class Service:
    """A served model.

    Args:
        engine: closed by `close`.
        observers: are told of every request and step.
        on_failure: called when the engine has failed and every request has heard of it.

    Attributes:
        metrics: what was counted since the start.
    """

    def __init__(
        self,
        engine: LLMEngine,
        options: ServiceOptions,
        observers: Sequence[EngineObserver] = (),
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        self._options = options
        self._tokenizer = engine.tokenizer
        self._max_model_len = engine.scheduler.max_model_len
        self._prompts = PromptEncoder(engine.tokenizer, self._max_model_len)
        self._ids = itertools.count()
        self._closed = False
        self._delivery = Delivery(self._abort)
        self.metrics = EngineMetrics(engine.scheduler.max_model_len, engine.stats(), _cache_info(engine))
        self._on_failure = on_failure
        self._thread = EngineThread(engine, self._delivery, (self.metrics, *observers), self._failed)
        self._grammars = GrammarQueue(engine)

    @classmethod
    def load(cls, folder: Path, options: ServiceOptions, on_failure: Callable[[], None] = lambda: None) -> Service:
        """Opens what `compile llm` published.

        Args:
            folder: of the version.
            options, on_failure: as above.

        Raises:
            ModelkilnError: the model cannot be read or does not fit.
        """
        model = folder.parent.name
        started = time.monotonic()
        engine = LLMEngine.load(folder)
        report(model, "load", time.monotonic() - started - engine.compile_seconds)
        report(model, "compile", engine.compile_seconds)
        with phase(model, "warm_up"):
            engine.warm_up()
        return cls(engine, options, on_failure=on_failure)

    def submit(self, channel: Channel, tensors: Tensors, *, parameters: str = "", timeout_us: int = 0) -> None:
        """Takes a request; the channel gets one final response, whatever becomes of it.

        Args:
            tensors, parameters, timeout_us: see `request_from_tensors`.
        """
        received_ns = time.monotonic_ns()
        request = None
        try:
            cancel_id = cancel_from_tensors(tensors)
            if cancel_id is not None:
                self._delivery.cancel(cancel_id, channel)
                return
            request = request_from_tensors(
                tensors,
                max_model_len=self._max_model_len,
                parameters=parameters,
                timeout_us=timeout_us,
                default_deadline_ms=self._options.default_deadline_ms,
            )
            if isinstance(request.prompt, str):
                request = replace(request, prompt=self._prompts.token_ids(request.prompt))
        except Exception as error:  # one request's error is its own
            if not isinstance(error, ModelkilnError):
                log.exception("a request could not be read")
            refusal = response_error(error, request.prompt_input if request else "")
            channel.send(None, refusal, final=True)
            self._thread.refused(refusal)
            return
        if self._closed:
            channel.send(None, UNLOADING, final=True)
            return
        request_id = str(next(self._ids))
        self._delivery.open(request_id, channel, ResponseBuilder(request, self._tokenizer), request.cancel_id)
        if not self._grammars.lacks(request.params):
            self._thread.add(request_id, request, received_ns)
            return
        try:
            self._grammars.compile(
                request.params, lambda *result: self._compiled(request_id, request, received_ns, *result)
            )
        except Exception as error:  # the queue is full, or closed by now
            self._refuse(request_id, error)

    def close(self, timeout_s: float = 30.0) -> None:
        """Ends all requests, and returns when both threads have ended or the time is over."""
        self._closed = True
        self._grammars.close()
        if not self._thread.close(timeout_s):
            log.error("the engine's step did not end within %g s", timeout_s)
        self._delivery.close(timeout_s)

    def _compiled(
        self, request_id: str, request: ServedRequest, received_ns: int, error: Exception | None, took_ms: float
    ) -> None:
        """Hands a request over whose grammar is compiled now, if its client still waits."""
        if error is not None:
            self._refuse(request_id, error)
            return
        if request.deadline_ms is not None:
            request = replace(request, deadline_ms=request.deadline_ms - took_ms)
        self._delivery.if_open(request_id, lambda: self._thread.add(request_id, request, received_ns))

    def _refuse(self, request_id: str, error: Exception) -> None:
        refusal = response_error(error)
        self._thread.refused(refusal)
        self._delivery.refuse(request_id, refusal)

    def _failed(self) -> None:
        self._delivery.then(self._on_failure)

    def _abort(self, request_id: str) -> None:
        self._thread.abort(request_id)


def _cache_info(engine: LLMEngine) -> dict[str, str]:
    """Returns the labels of `vllm:cache_config_info`, by vLLM's names and in Python's words as there."""
    return {
        "block_size": str(engine.block_size),
        "num_gpu_blocks": str(engine.stats().scheduler.num_blocks),
        "enable_prefix_caching": str(engine.scheduler.config.enable_prefix_cache),
    }
