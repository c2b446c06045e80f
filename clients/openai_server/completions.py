"""Completions: whole, and as chunks of a stream. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from clients.generation import Chunk
from clients.openai_server.answers import DONE, TokenLogprob, Usage, event, finish_reason, token_logprobs


@dataclass(frozen=True)
class Echo:
    """A prompt that its answers begin with; empty where they do not.

    Attributes:
        first_token: the text of the prompt's first token.
    """

    text: str = ""
    first_token: str = ""


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
    echoes: Sequence[Echo],
    num_top: int | None,
) -> dict[str, Any]:
    """Returns the whole answers, given those to each prompt.

    Args:
        echoes: what the answers to each prompt begin with.

    Raises:
        ApiError: an answer was ended by the server.
    """
    choices: list[dict[str, Any]] = []
    usages = [Usage()] * len(echoes)
    for prompt, (to_prompt, echo) in enumerate(zip(answers, echoes, strict=True)):
        for answer in to_prompt:
            usages[prompt] = usages[prompt].with_answer(answer)
            logprobs = None
            if num_top is not None:
                logprobs = _logprobs(token_logprobs(answer.logprobs, num_top), len(echo.text))
                if echo.text:
                    logprobs = _joined(_echo_logprobs(echo, answer, num_top), logprobs)
            choices.append(
                {
                    "index": len(choices),
                    "text": echo.text + answer.text,
                    "logprobs": logprobs,
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


def without_tokens(answer: Chunk) -> Chunk:
    """Returns an answer of no tokens in place of one."""
    usage = answer.usage and replace(answer.usage, completion_tokens=0)
    return answer._replace(text="", logprobs=None, usage=usage, finish_reason="length")


def _echo_logprobs(echo: Echo, answer: Chunk, num_top: int) -> dict[str, Any]:
    """Returns those of a prompt's tokens; the first has none, since nothing stands before it."""
    # A BOS that the tokenizer put there is no part of the text.
    offset = len(echo.first_token) if echo.text.startswith(echo.first_token) else 0
    rest = _logprobs(token_logprobs(answer.prompt_logprobs, num_top), offset)
    first = {"tokens": [echo.first_token], "token_logprobs": [None], "top_logprobs": [None], "text_offset": [0]}
    return _joined(first, rest)


def _joined(first: dict[str, Any], rest: dict[str, Any]) -> dict[str, Any]:
    return {name: values + rest[name] for name, values in first.items()}


def _logprobs(tokens: Sequence[TokenLogprob], offset: int) -> dict[str, Any]:
    """Returns them in the older form; `text_offset` counts characters from the start of the answer's text."""
    offsets = []
    for token in tokens:
        offsets.append(offset)
        # Of a character that takes several tokens the first byte counts: the others are 10xxxxxx.
        offset += sum(byte & 0xC0 != 0x80 for byte in token.bytes)
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
