"""EngineObserver: what the engine thread tells about its work, for those who count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from backends.llm.engine.results import EngineStats, StepOutput
from backends.llm.sampling.params import SamplingParams


class EngineObserver(Protocol):
    """Is told of every request from its acceptance to its end. All times are of `time.monotonic_ns`."""

    def added(self, request_id: str, params: SamplingParams, received_ns: int) -> None:
        """The engine has taken a request.

        Args:
            received_ns: when it came to us; what it waited for the engine counts as waiting.
        """

    def refused(self, kind: str) -> None:
        """A request was refused.

        Args:
            kind: as in the error's brackets: "invalid_request", "context_length_exceeded", "overloaded", "deadline".
        """

    def stepped(self, outputs: Sequence[StepOutput], stats: EngineStats, now_ns: int) -> None:
        """A step, or an abort, gave these outputs.

        Args:
            outputs: all of them, those of requests whose client has gone too.
            stats: of the engine after it.
        """

    def failed(self, now_ns: int) -> None:
        """The engine has failed: every request that it had ended with an error."""
