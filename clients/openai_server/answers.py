"""What all answers share: usage, log probabilities, ids, and server-sent events as bytes. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clients.generation import Chunk
from clients.openai_server.errors import ApiError, deadline_error, unavailable

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request so far."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def with_answer(self, answer: Chunk) -> Usage:
        """Returns the usage with an answer that has ended; all answers to a prompt share its tokens."""
        if answer.usage is None:
            return self
        return Usage(
            answer.usage.prompt_tokens,
            self.completion_tokens + answer.usage.completion_tokens,
            answer.usage.cached_tokens,
        )

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cached_tokens + other.cached_tokens,
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


def event(data: object) -> bytes:
    """Returns a server-sent event. It is ASCII: some clients split lines at U+2028, too."""
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"


def finish_reason(reason: str | None) -> str | None:
    """Returns why an answer ended, or None where it goes on.

    Raises:
        ApiError: it did not end in a way that the API has.
    """
    if reason in (None, "stop", "length"):
        return reason
    raise _bad_end(reason)


def _bad_end(reason: str | None) -> ApiError:
    if reason == "deadline":
        return deadline_error("the deadline came before the end of the answer")
    return unavailable(f"the answer was ended by the server: {reason}")


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token with its natural log probability, and the best ones at its place."""

    token: str
    logprob: float
    bytes: Sequence[int]
    top: Sequence[TokenLogprob] = ()

    def to_json(self) -> dict[str, Any]:
        return {"token": self.token, "logprob": self.logprob, "bytes": list(self.bytes)}


def token_logprobs(entries: Sequence[Mapping[str, Any]] | None, num_top: int) -> list[TokenLogprob]:
    """Returns the log probabilities of a chunk: of each token a mapping by id, the chosen one first."""
    found = []
    for entry in entries or ():
        chosen, *_ = tokens = list(entry.values())
        best = sorted((t for t in tokens if t["rank"] <= num_top), key=lambda t: int(t["rank"]))
        found.append(_one(chosen, tuple(_one(token) for token in best)))
    return found


def _one(token: dict[str, Any], top: Sequence[TokenLogprob] = ()) -> TokenLogprob:
    # Smaller than any number that clients read: JSON has no infinity.
    logprob = max(float(token["logprob"]), -9999.0)
    return TokenLogprob(token["decoded_token"], logprob, token["bytes"], top)
