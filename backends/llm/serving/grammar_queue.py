"""GrammarQueue: compiles the grammars of requests beside the engine, so that no step waits for one."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from backends.llm.engine.engine import LLMEngine
from backends.llm.errors import RequestRefused
from backends.llm.sampling.params import SamplingParams
from compiler.errors import ModelkilnError

log = logging.getLogger(__name__)

_MAX_PENDING = 1024


class GrammarQueue:
    """One thread that compiles, one grammar after the other.

    Args:
        engine: only its `lacks_grammar` and `compile_grammar` are called, which are safe for threads.
    """

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="llm-grammar")
        self._lock = threading.Lock()
        self._num_pending = 0

    def lacks(self, params: SamplingParams) -> bool:
        """Returns whether a request has to wait for its grammar."""
        return self._engine.lacks_grammar(params)

    def compile(self, params: SamplingParams, done: Callable[[Exception | None, float], None]) -> None:
        """Calls `done` from the queue's thread: with the error or None, and the milliseconds that it took.

        Raises:
            RequestRefused: too many wait.
        """
        with self._lock:
            if self._num_pending >= _MAX_PENDING:
                raise RequestRefused(f"{self._num_pending} requests wait for their grammars already", "overloaded")
            self._num_pending += 1
        self._pool.submit(self._compile, params, done, time.monotonic())

    def close(self) -> None:
        """Ends the queue; what waits in it is forgotten."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _compile(self, params: SamplingParams, done: Callable[[Exception | None, float], None], since: float) -> None:
        error: Exception | None = None
        try:
            self._engine.compile_grammar(params)
        except Exception as failure:
            if not isinstance(failure, ModelkilnError):
                log.exception("a grammar was not compiled")
            error = failure
        with self._lock:
            self._num_pending -= 1
        done(error, (time.monotonic() - since) * 1e3)
