"""Chat answers: whole, and as chunks of a stream. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from clients.generation import Chunk
from clients.openai_server.answers import DONE, TokenLogprob, Usage, event, finish_reason, token_logprobs
from clients.openai_server.tool_calls import CallDelta, ToolParser


class ChatStream:
    """Makes the events of one request. First of each answer comes its role, last its reason without content.

    Args:
        request_id: the `id` of all chunks.
        num_top: top_logprobs, or None where no log probabilities are wanted.
        include_usage: an event before the last tells the tokens that were used.
        parsers: one for each answer where it may call tools, else none.
    """

    def __init__(
        self,
        request_id: str,
        created: int,
        model: str,
        n: int,
        *,
        num_top: int | None,
        include_usage: bool,
        parsers: Sequence[ToolParser] = (),
    ) -> None:
        self._head = {"id": request_id, "object": "chat.completion.chunk", "created": created, "model": model}
        self._tail = {"usage": None} if include_usage else {}
        self._include_usage = include_usage
        self._num_top = num_top
        self._parsers = parsers
        self._called = [False] * n
        self.usage = Usage()
        # A chunk of text is most of a stream: all but the text is put together once.
        marked = json.dumps(self._choice(0, {"content": "@"}), separators=(",", ":"))
        before, self._after = marked.rsplit('"@"', 1)
        self._before = [before.replace('"choices":[{"index":0', f'"choices":[{{"index":{i}', 1) for i in range(n)]

    def start(self) -> bytes:
        """Returns the chunks that come before any text."""
        delta = {"role": "assistant", "content": "", "refusal": None}
        return b"".join(event(self._choice(index, delta)) for index in range(len(self._before)))

    def update(self, chunk: Chunk) -> bytes:
        """Returns the events of a chunk of an answer, none where nothing can leave.

        Raises:
            ApiError: the answer was ended by the server.
        """
        self.usage = self.usage.with_answer(chunk)
        ended = finish_reason(chunk.finish_reason)
        data = self._text(chunk, ended is not None)
        if ended is None:
            return data
        return data + event(self._choice(chunk.index, {}, self._reason(chunk.index, ended)))

    def finish(self) -> bytes:
        """Returns what ends the stream."""
        if not self._include_usage:
            return DONE
        return event({**self._head, "choices": [], "usage": self.usage.to_json()}) + DONE

    def _text(self, chunk: Chunk, is_last: bool) -> bytes:
        if not self._parsers and self._num_top is None:
            if not chunk.text:
                return b""
            return f"data: {self._before[chunk.index]}{json.dumps(chunk.text)}{self._after}\n\n".encode()
        deltas = self._deltas(chunk, is_last)
        if self._num_top is None:
            return b"".join(event(self._choice(chunk.index, delta)) for delta in deltas)
        tokens = token_logprobs(chunk.logprobs, self._num_top)
        if tokens and not deltas:  # their text is held back
            deltas = [{"content": ""}]
        # All tokens stand with the first part: which of them a part is made of is not known.
        of_parts = [_logprobs(tokens), *[None] * len(deltas)]
        events = zip(deltas, of_parts, strict=False)
        return b"".join(event(self._choice(chunk.index, delta, logprobs=found)) for delta, found in events)

    def _deltas(self, chunk: Chunk, is_last: bool) -> list[dict[str, Any]]:
        if not self._parsers:
            return [{"content": chunk.text}] if chunk.text else []
        parser, deltas = self._parsers[chunk.index], list[dict[str, Any]]()
        for part in [*parser.push(chunk.text), *(parser.finish() if is_last else ())]:
            if isinstance(part, CallDelta):
                self._called[chunk.index] = True
                deltas.append({"tool_calls": [part.to_json()]})
            else:
                deltas.append({"content": part})
        return deltas

    def _reason(self, index: int, reason: str) -> str:
        return self._parsers[index].finish_reason if self._called[index] and reason == "stop" else reason

    def _choice(
        self, index: int, delta: dict[str, Any], reason: str | None = None, logprobs: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return {**self._head, "choices": [choice], **self._tail}


def chat_response(
    request_id: str,
    created: int,
    model: str,
    answers: Sequence[Chunk],
    *,
    num_top: int | None,
    new_parser: Callable[[], ToolParser] | None,
) -> dict[str, Any]:
    """Returns the whole answers.

    Raises:
        ApiError: an answer was ended by the server.
    """
    choices = []
    usage = Usage()
    for answer in answers:
        usage = usage.with_answer(answer)
        message, called = _message(answer.text, new_parser() if new_parser else None)
        tokens = None if num_top is None else token_logprobs(answer.logprobs, num_top)
        ended = finish_reason(answer.finish_reason)
        choices.append(
            {
                "index": answer.index,
                "message": message,
                "logprobs": None if tokens is None else _logprobs(tokens),
                "finish_reason": called if called and ended == "stop" else ended,
            }
        )
    return {
        "id": request_id,
        "object": "chat.completion",
        "created": created,
        "model": model,
        "choices": choices,
        "usage": usage.to_json(),
    }


def _message(text: str, parser: ToolParser | None) -> tuple[dict[str, Any], str]:
    """Returns the message of an answer, and the finish reason that its calls give it or an empty string."""
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if parser is None:
        return message, ""
    parts = [*parser.push(text), *parser.finish()]
    calls = [part for part in parts if isinstance(part, CallDelta)]
    content = "".join(part for part in parts if isinstance(part, str))
    if not calls:
        return {**message, "content": content}, ""
    made = [{key: value for key, value in call.to_json().items() if key != "index"} for call in calls]
    return {**message, "content": content or None, "tool_calls": made}, parser.finish_reason


def _logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    content = [{**token.to_json(), "top_logprobs": [top.to_json() for top in token.top]} for token in tokens]
    return {"content": content, "refusal": None}
