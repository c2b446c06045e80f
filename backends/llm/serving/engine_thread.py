"""EngineThread: the engine, and the one thread that calls it. Commands come from any thread; outputs go to a sink."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from backends.llm.engine.engine import LLMEngine
from backends.llm.engine.results import StepOutput
from backends.llm.serving.errors import UNLOADING, ResponseError, response_error
from backends.llm.serving.observer import EngineObserver
from backends.llm.serving.requests import ServedRequest
from compiler.errors import ModelkilnError

log = logging.getLogger(__name__)


class Sink(Protocol):
    """Where the thread's outputs go."""

    def step(self, outputs: Sequence[StepOutput]) -> None:
        """Takes what one step added to all requests, also where that is nothing; the next step waits for its return."""
        ...

    def refuse(self, request_id: str, error: ResponseError) -> None:
        """Ends one request, which the engine does not know (any more)."""
        ...

    def refuse_all(self, error: ResponseError) -> None:
        """Ends every request that has not ended."""
        ...


@dataclass(frozen=True, slots=True)
class _Add:
    request_id: str
    request: ServedRequest
    received_ns: int


@dataclass(frozen=True, slots=True)
class _Abort:
    request_id: str


@dataclass(frozen=True, slots=True)
class _Refused:
    kind: str


_Command = _Add | _Abort | _Refused


class EngineThread:
    """Runs an engine until it is closed or fails.

    Commands are taken before each step, so that a request waits for one step at most until it is known. Without
    requests the thread sleeps.

    Args:
        engine: called by this thread alone from now on, and closed by it.
        sink: hears of everything in the order in which it happened.
        observers: are told of it too, for counting.
        on_failure: called when the engine has failed, which it does not recover from, and the sink has heard of it.
    """

    def __init__(
        self,
        engine: LLMEngine,
        sink: Sink,
        observers: Sequence[EngineObserver] = (),
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        self._engine = engine
        self._on_failure = on_failure
        self._has_failed = False
        self._sink = sink
        self._observers = tuple(observers)
        self._changed = threading.Condition()
        self._commands: list[_Command] = []
        self._refusal: ResponseError | None = None  # why nothing is taken any more
        self._thread = threading.Thread(target=self._run, name="llm-engine", daemon=True)
        self._thread.start()

    def add(self, request_id: str, request: ServedRequest, received_ns: int) -> None:
        """Hands a request over that came at that time; the sink hears what becomes of it."""
        self._put(_Add(request_id, request, received_ns))

    def abort(self, request_id: str) -> None:
        """Ends a request before the next step; the sink hears nothing more of it but what is under way."""
        self._put(_Abort(request_id))

    def refused(self, error: ResponseError) -> None:
        """Tells the observers of a request that was refused before it came here."""
        self._put(_Refused(error.kind))

    def close(self, timeout_s: float = 30.0) -> bool:
        """Ends all requests with UNLOADING, closes the engine and waits for the thread.

        Returns:
            Whether the thread ended in time; a step is not interrupted.
        """
        with self._changed:
            self._refusal = self._refusal or UNLOADING
            self._changed.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _put(self, command: _Command) -> None:
        with self._changed:
            refusal = self._refusal
            if refusal is None:
                self._commands.append(command)
                self._changed.notify()
        if refusal is not None and isinstance(command, _Add):
            self._sink.refuse(command.request_id, refusal)

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except Exception as error:
            self._fail(error)
        assert self._refusal is not None
        for command in self._commands:
            if isinstance(command, _Add):
                self._sink.refuse(command.request_id, self._refusal)
        self._sink.refuse_all(self._refusal)
        if self._has_failed:
            self._on_failure()
        else:
            self._engine.close()

    def _turn(self) -> bool:
        """Takes the commands and computes a step; returns whether to go on."""
        with self._changed:
            while not self._commands and not self._engine.has_requests and self._refusal is None:
                self._changed.wait()
            if self._refusal is not None:
                return False
            commands, self._commands = self._commands, []
        for command in commands:
            self._do(command)
        if self._engine.has_requests:
            outputs = self._engine.step()
            self._tell_outputs(outputs)
            self._sink.step(outputs)
        return True

    def _do(self, command: _Command) -> None:
        if isinstance(command, _Add):
            self._add(command)
        elif isinstance(command, _Abort):
            self._tell_outputs(self._engine.abort(command.request_id))
        else:
            self._tell(lambda observer: observer.refused(command.kind))

    def _add(self, command: _Add) -> None:
        request = command.request
        try:
            self._engine.add_request(
                command.request_id,
                request.prompt,
                request.params,
                priority=request.priority,
                client=request.client,
                deadline_ms=request.deadline_ms,
                cache_salt=request.cache_salt,
            )
        except Exception as error:  # one request's error is its own
            if not isinstance(error, ModelkilnError):
                log.exception("request %s was not taken", command.request_id)
            refusal = response_error(error, request.prompt_input)
            self._tell(lambda observer: observer.refused(refusal.kind))
            self._sink.refuse(command.request_id, refusal)
        else:
            self._tell(lambda observer: observer.added(command.request_id, request.params, command.received_ns))

    def _fail(self, error: Exception) -> None:
        log.error("the engine failed", exc_info=error)
        self._has_failed = True
        self._tell(lambda observer: observer.failed(time.monotonic_ns()))
        with self._changed:
            self._refusal = ResponseError("internal", f"the engine failed with {type(error).__name__}")

    def _tell_outputs(self, outputs: Sequence[StepOutput]) -> None:
        if self._observers:
            stats, now_ns = self._engine.stats(), time.monotonic_ns()
            self._tell(lambda observer: observer.stepped(outputs, stats, now_ns))

    def _tell(self, tell: Callable[[EngineObserver], None]) -> None:
        """Tells all observers; one that fails hears nothing more, and no request suffers."""
        for observer in self._observers:
            try:
                tell(observer)
            except Exception:
                log.exception("an observer failed, and hears nothing more")
                self._observers = tuple(other for other in self._observers if other is not observer)
