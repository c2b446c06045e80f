"""Completions: whole, and as chunks of a stream. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from clients.openai_server.answers import DONE, TokenLogprob, Usage, event, finish_reason, token_logprobs
from clients.openai_server.generation import Update


class CompletionStream:
    """Makes the events of one request with one or more prompts; answer i of prompt p has the index p * n + i.

    Args:
        echoes: the prompts' texts where answers begin with them, else empty ones.
        num_top: alternatives for each token, or None where no log probabilities are wanted.
    """

    def __init__(
        self,
        request_id: str,
        created: int,
        model: str,
        n: int,
        *,
        echoes: Sequence[str],
        num_top: int | None,
        include_usage: bool,
    ) -> None:
        self._head = {"id": request_id, "object": "text_completion", "created": created, "model": model}
        self._tail = {"usage": None} if include_usage else {}
        self._include_usage = include_usage
        self._n = n
        self._num_top = num_top
        self._echoes = echoes
        self._lengths = [len(echo) for echo in echoes for _ in range(n)]  # characters so far
        self._open = [True] * (n * len(echoes))
        self._usages = [Usage()] * len(echoes)

    @property
    def usage(self) -> Usage:
        return sum(self._usages, Usage())

    def start(self) -> bytes:
        """Returns the chunks that come before any answer: prompts that are echoed."""
        echoes = [(p * self._n + i, echo) for p, echo in enumerate(self._echoes) for i in range(self._n) if echo]
        return b"".join(event(self._choice(index, echo)) for index, echo in echoes)

    def update(self, prompt: int, update: Update) -> bytes:
        """Returns the events of a response to the prompt of that number, none where nothing can leave.

        Raises:
            ApiError: an answer was ended by the server.
        """
        self._usages[prompt] = Usage.of(update)
        events = []
        for number, (text, reason) in enumerate(zip(update.texts, update.finish_reasons, strict=True)):
            index = prompt * self._n + number
            if not self._open[index]:
                continue
            ended = finish_reason(reason)
            tokens = None
            if self._num_top is not None:
                tokens = token_logprobs(update.logprobs[number] if update.logprobs else "", self._num_top)
            if text or tokens:
                logprobs = None if tokens is None else _logprobs(tokens, self._lengths[index])
                events.append(event(self._choice(index, text, logprobs=logprobs)))
                self._lengths[index] += len(text)
            if ended is not None:
                self._open[index] = False
                events.append(event(self._choice(index, "", ended)))
        return b"".join(events)

    def finish(self) -> bytes:
        """Returns what ends the stream."""
        if not self._include_usage:
            return DONE
        return event({**self._head, "choices": [], "usage": self.usage.to_json()}) + DONE

    def _choice(
        self, index: int, text: str, reason: str | None = None, logprobs: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        return {**self._head, "choices": [choice], **self._tail}


def completion_response(
    request_id: str,
    created: int,
    model: str,
    updates: Sequence[Update],
    *,
    echoes: Sequence[str],
    num_top: int | None,
) -> dict[str, Any]:
    """Returns the whole answers, given the one response to each prompt.

    Raises:
        ApiError: an answer was ended by the server.
    """
    choices: list[dict[str, Any]] = []
    for update, echo in zip(updates, echoes, strict=True):
        for number, (text, reason) in enumerate(zip(update.texts, update.finish_reasons, strict=True)):
            tokens = None if num_top is None else token_logprobs(update.logprobs[number], num_top)
            choices.append(
                {
                    "index": len(choices),
                    "text": echo + text,
                    "logprobs": None if tokens is None else _logprobs(tokens, len(echo)),
                    "finish_reason": finish_reason(reason),
                }
            )
    return {
        "id": request_id,
        "object": "text_completion",
        "created": created,
        "model": model,
        "choices": choices,
        "usage": sum((Usage.of(update) for update in updates), Usage()).to_json(),
    }


def _logprobs(tokens: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
    """Returns them in the older form; `text_offset` counts characters from the start of the answer's text."""
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.token)
    return {
        "tokens": [token.token for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        "top_logprobs": [{top.token: top.logprob for top in token.top} for token in tokens],
        "text_offset": offsets,
    }
