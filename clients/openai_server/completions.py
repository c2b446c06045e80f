"""Completions: whole, and as chunks of a stream. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from clients.generation import Chunk
from clients.openai_server.answers import DONE, TokenLogprob, Usage, event, finish_reason, token_logprobs


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
        self._usages = [Usage()] * len(echoes)

    @property
    def usage(self) -> Usage:
        return sum(self._usages, Usage())

    def start(self) -> bytes:
        """Returns the chunks that come before any answer: prompts that are echoed."""
        echoes = [(p * self._n + i, echo) for p, echo in enumerate(self._echoes) for i in range(self._n) if echo]
        return b"".join(event(self._choice(index, echo)) for index, echo in echoes)

    def update(self, prompt: int, chunk: Chunk) -> bytes:
        """Returns the events of a chunk of an answer to the prompt of that number, none where nothing can leave.

        Raises:
            ApiError: the answer was ended by the server.
        """
        self._usages[prompt] = self._usages[prompt].with_answer(chunk)
        index = prompt * self._n + chunk.index
        ended = finish_reason(chunk.finish_reason)
        tokens = None if self._num_top is None else token_logprobs(chunk.logprobs, self._num_top)
        data = b""
        if chunk.text or tokens:
            logprobs = None if tokens is None else _logprobs(tokens, self._lengths[index])
            data = event(self._choice(index, chunk.text, logprobs=logprobs))
            self._lengths[index] += len(chunk.text)
        return data if ended is None else data + event(self._choice(index, "", ended))

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
    answers: Sequence[Sequence[Chunk]],
    *,
    echoes: Sequence[str],
    num_top: int | None,
) -> dict[str, Any]:
    """Returns the whole answers, given those to each prompt.

    Raises:
        ApiError: an answer was ended by the server.
    """
    choices: list[dict[str, Any]] = []
    usages = [Usage()] * len(echoes)
    for prompt, (to_prompt, echo) in enumerate(zip(answers, echoes, strict=True)):
        for answer in to_prompt:
            usages[prompt] = usages[prompt].with_answer(answer)
            tokens = None if num_top is None else token_logprobs(answer.logprobs, num_top)
            choices.append(
                {
                    "index": len(choices),
                    "text": echo + answer.text,
                    "logprobs": None if tokens is None else _logprobs(tokens, len(echo)),
                    "finish_reason": finish_reason(answer.finish_reason),
                }
            )
    return {
        "id": request_id,
        "object": "text_completion",
        "created": created,
        "model": model,
        "choices": choices,
        "usage": sum(usages, Usage()).to_json(),
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
        "top_logprobs": [_best(token) for token in tokens],
        "text_offset": offsets,
    }


def _best(token: TokenLogprob) -> dict[str, float]:
    """Returns the best tokens' log probabilities by text, and the chosen one's, which may be one more."""
    best: dict[str, float] = {}
    for one in (*token.top, token):
        best.setdefault(one.token, one.logprob)  # several tokens may have one text
    return best
