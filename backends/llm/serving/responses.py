"""What the steps of a request add up to, as the tensors of its responses. Pure; the tensors of docs/serving_llm.md."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from backends.llm.engine.results import StepOutput
from backends.llm.sampling.logprobs import TokenLogprobs
from backends.llm.serving.requests import ServedRequest
from backends.llm.tokenizers.base import Tokenizer

ResponseTensors = dict[str, npt.NDArray[Any]]
GOES_ON = "None"  # the text of Python's None, which Triton's vLLM backend sends


@dataclass(slots=True)
class _Pending:
    """What one answer has for the next response, and where it stands."""

    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str = GOES_ON
    cumulative_logprob: float = 0.0
    num_output_tokens: int = 0
    num_told: int = 0  # of them, in the responses before
    has_ended_now: bool = False


class ResponseBuilder:
    """Collects what steps add to one request, and gives it away as tensors.

    Args:
        request: which outputs it wants, and how often.
        tokenizer: for the texts of tokens with log probabilities.
    """

    def __init__(self, request: ServedRequest, tokenizer: Tokenizer) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._answers = [_Pending(pieces=[request.prefix] * bool(request.prefix)) for _ in range(request.params.n)]
        self._num_input_tokens = self._num_cached_tokens = 0
        self._prompt_logprobs: Sequence[TokenLogprobs] = ()
        self._has_news = False

    def add(self, output: StepOutput) -> None:
        """Takes what one step adds to one answer."""
        answer, delta = self._answers[output.index], output.delta
        if delta.text:
            answer.pieces.append(delta.text)
        answer.token_ids += delta.token_ids
        if delta.logprobs:
            answer.logprobs += delta.logprobs
            answer.cumulative_logprob += sum(entry.logprob for entry in delta.logprobs)
        if delta.finish_reason is not None:
            answer.finish_reason = delta.finish_reason.value
            answer.has_ended_now = True
        answer.num_output_tokens = output.usage.num_output_tokens
        if output.index == 0:
            self._num_input_tokens = output.usage.num_prompt_tokens
            self._num_cached_tokens = output.usage.num_cached_tokens
        self._prompt_logprobs = output.prompt_logprobs or self._prompt_logprobs
        self._has_news = self._has_news or bool(delta.text) or delta.finish_reason is not None or self._wants(delta)

    def take(self, *, is_last: bool) -> ResponseTensors | None:
        """Returns the next response, or None where there is nothing to send yet."""
        if not is_last and not (self._request.stream and self._has_news):
            return None
        wanted, answers = self._request.outputs, self._answers
        tensors: ResponseTensors = {"text_output": _strings(["".join(a.pieces) for a in answers])}
        if "finish_reason" in wanted:
            tensors["finish_reason"] = _strings([a.finish_reason for a in answers])
        if "cumulative_logprob" in wanted:
            tensors["cumulative_logprob"] = np.array([a.cumulative_logprob for a in answers], dtype=np.float32)
        if "logprobs" in wanted:
            tensors["logprobs"] = _strings([self._logprobs_json(a.logprobs) for a in answers])
        if "num_input_tokens" in wanted:
            tensors["num_input_tokens"] = np.full(len(answers), self._num_input_tokens, dtype=np.uint32)
        if "num_output_tokens" in wanted:
            tensors["num_output_tokens"] = np.array(
                [a.num_output_tokens - a.num_told for a in answers], dtype=np.uint32
            )
        if "num_cached_tokens" in wanted:
            tensors["num_cached_tokens"] = np.full(len(answers), self._num_cached_tokens, dtype=np.uint32)
        if "token_ids" in wanted:
            tensors["token_ids"] = np.array(answers[0].token_ids, dtype=np.int32)
        if "usage" in wanted and any(a.has_ended_now for a in answers):
            tensors["usage"] = _strings([self._usage_json(a) if a.has_ended_now else "" for a in answers])
        if "prompt_logprobs" in wanted and is_last:
            tensors["prompt_logprobs"] = _strings([self._logprobs_json(self._prompt_logprobs)])
        for answer in answers:
            answer.pieces, answer.token_ids, answer.logprobs = [], [], []
            answer.num_told = answer.num_output_tokens
            answer.has_ended_now = False
        self._has_news = False
        return tensors

    def _wants(self, delta: Any) -> bool:
        """Whether tokens without a text are news: half of a character, what may become a stop string."""
        return bool(delta.token_ids) and not self._request.outputs.isdisjoint(("token_ids", "logprobs"))

    def _usage_json(self, answer: _Pending) -> str:
        counts = {"prompt_tokens": self._num_input_tokens, "completion_tokens": answer.num_output_tokens}
        return json.dumps({"finish_reason": answer.finish_reason, **counts, "cached_tokens": self._num_cached_tokens})

    def _logprobs_json(self, entries: Sequence[TokenLogprobs]) -> str:
        return json.dumps([self._token_json(entry) for entry in entries], ensure_ascii=False)

    def _token_json(self, entry: TokenLogprobs) -> dict[int, Any]:
        """Returns token id -> what is known of it, the chosen one first."""
        tokens = {entry.token_id: (entry.logprob, entry.rank)}
        for rank, (token_id, logprob) in enumerate(entry.top, start=1):
            tokens.setdefault(token_id, (logprob, rank))
        return {token_id: self._described(token_id, *known) for token_id, known in tokens.items()}

    def _described(self, token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        data = self._tokenizer.token_bytes(token_id)
        text = (data or self._tokenizer.token_bytes(token_id, with_special=True)).decode(errors="replace")
        # JSON has no infinity; a token that cannot be has this log probability in the OpenAI API.
        return {
            "logprob": max(logprob, -9999.0),
            "rank": rank,
            "decoded_token": text,
            "bytes": [*(data or text.encode())],
        }


def empty_response() -> ResponseTensors:
    """Returns what a request is answered with that is not for an answer."""
    return {"text_output": _strings([""])}


def _strings(values: Sequence[str]) -> npt.NDArray[np.object_]:
    return np.array([value.encode() for value in values], dtype=np.object_)
