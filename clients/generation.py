"""Language models: a prompt as tensors, and responses as pieces of text (docs/serving_llm.md). Pure."""

from __future__ import annotations

import json
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from clients.errors import InputError
from clients.requests import InferRequest, build_request
from clients.types import ModelMetadata

Prompt = str | Sequence[int] | npt.NDArray[np.integer[Any]]
Logprobs = list[dict[str, Any]]

# Gives an output of a response by name, one value for each answer; None where it is absent.
GetOutput = Callable[[str], "list[Any] | None"]

# How an answer ended: other servers say it in these, with each response, and ours in one output with the last.
_WITH_EACH = ("finish_reason", "num_input_tokens", "num_output_tokens", "num_cached_tokens")
# A finish reason while an answer goes on: the text of None, which Triton's vLLM backend made customary.
GOES_ON = "None"
_CANCEL = {"cancel", "cancel_id"}
_RESERVED = ("stream", "text_input", "input_ids", "sampling_parameters", *sorted(_CANCEL))


@dataclass(frozen=True)
class Usage:
    """Tokens of a prompt, of one answer to it, and of the prompt those that were found in the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


class Chunk(NamedTuple):
    """What is new of one answer. (There is one for each token, and a frozen dataclass is slow to make.)

    Attributes:
        text: may be empty: a token need not end a character, and text that may become a stop string is held back.
        index: which of the request's `n` answers.
        finish_reason: None while it goes on; "stop", "length", "abort" or "deadline" on its last chunk.
        usage: on its last chunk.
        logprobs: one object for each new token, as the server gives it: token id -> `{"logprob", "rank", ...}`.
        token_ids: the new tokens, where they were asked for.
        cumulative_logprob: of the answer so far, where log probabilities were asked for.
        prompt_logprobs: as `logprobs`, of the prompt's tokens after the first, where the sampling parameter
            `prompt_logprobs` asks for them; with the last response.
    """

    text: str
    index: int = 0  # type: ignore[assignment]  # the word of all APIs; a tuple's own method is of no use here
    finish_reason: str | None = None
    usage: Usage | None = None
    logprobs: Logprobs | None = None
    token_ids: tuple[int, ...] | None = None
    cumulative_logprob: float | None = None
    prompt_logprobs: Logprobs | None = None


@dataclass(frozen=True)
class Generation:
    """A whole answer, or the `n` that were asked for: `text` and the others are the first one's."""

    answers: tuple[Chunk, ...]

    @property
    def text(self) -> str:
        return self.answers[0].text

    @property
    def finish_reason(self) -> str | None:
        return self.answers[0].finish_reason

    @property
    def usage(self) -> Usage | None:
        return self.answers[0].usage

    @property
    def logprobs(self) -> Logprobs | None:
        return self.answers[0].logprobs

    @property
    def token_ids(self) -> tuple[int, ...] | None:
        return self.answers[0].token_ids


@dataclass(frozen=True)
class GenerateOptions:
    """What goes beside the prompt and the sampling parameters.

    Attributes:
        version: "" lets the server choose.
        timeout_s: the server ends the answer then, with what there is and the finish reason "deadline".
        token_ids: the answer's tokens are wanted, too.
        tensors: more of the model's inputs by name: `priority`, `client`, `cache_salt`, ...
    """

    version: str = ""
    request_id: str = ""
    timeout_s: float | None = None
    token_ids: bool = False
    tensors: Mapping[str, Any] | None = None


def generate_request(
    metadata: ModelMetadata, prompt: Prompt, sampling: Mapping[str, Any], options: GenerateOptions, *, stream: bool
) -> InferRequest:
    """The request for an answer to `prompt`.

    Outputs are asked for as far as the model has them: Triton's vLLM backend, say, knows no cached tokens.

    Raises:
        InputError: the model is no language model, a parameter is no JSON, or an extra input does not fit.
    """
    names = {tensor.name for tensor in metadata.inputs}
    if not {"text_input", "stream", "sampling_parameters"} <= names:
        valid = ", ".join(map(str, metadata.inputs))
        raise InputError(f"model {metadata.name!r} is no language model: its inputs are {valid}")
    inputs = {**_prompt_input(metadata.name, names, prompt), "stream": [stream]}
    inputs["sampling_parameters"] = [_sampling_json(sampling)]
    ends = ("usage",) if "return_usage" in names else _WITH_EACH
    wanted = {f"return_{name}" for name in ends} | {"exclude_input_in_output"}
    if sampling.get("logprobs") is not None:
        wanted |= {"return_logprobs", "return_cumulative_logprob"}
    if options.token_ids:
        wanted.add("return_token_ids")
    inputs.update({name: [True] for name in wanted & names})
    timeout_s = options.timeout_s
    if timeout_s is not None and "deadline_ms" in names:
        inputs["deadline_ms"] = [timeout_s * 1e3]
        timeout_s = None
    inputs.update(_more_inputs(options.tensors or {}))
    cancel = None
    if names >= _CANCEL:
        inputs["cancel_id"] = [cancel_id := uuid.uuid4().hex]  # nobody else can guess it
        cancel = build_request(metadata, {"cancel": [cancel_id]}, None, version=options.version)
    request = build_request(
        metadata, inputs, None, version=options.version, request_id=options.request_id, timeout_s=timeout_s
    )
    return replace(request, cancel=cancel)


def _prompt_input(model: str, names: set[str], prompt: Prompt) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"text_input": [prompt]}
    if "input_ids" not in names:
        raise InputError(f"model {model!r} takes no token ids, it has no input 'input_ids'; give the prompt as text")
    ids = np.asarray(prompt)
    if ids.ndim != 1 or (ids.dtype.kind not in "iu" and ids.size):
        raise InputError(
            f"a prompt is text or a flat sequence of token ids, not {type(prompt).__name__} of {ids.dtype} "
            f"with shape {list(ids.shape)}"
        )
    return {"input_ids": ids.astype(np.int64).tolist()}


def _sampling_json(sampling: Mapping[str, Any]) -> str:
    given = {name: value for name, value in sampling.items() if value is not None}
    try:
        return json.dumps(given, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise InputError(f"the sampling parameters {sorted(given)} are no JSON: {error}") from error


def _more_inputs(tensors: Mapping[str, Any]) -> dict[str, Any]:
    for name in tensors:
        if name in _RESERVED:
            raise InputError(f"{name!r} cannot be given as one of `tensors`: it is made from the other arguments")
    given = {name: value for name, value in tensors.items() if value is not None}
    return {name: [value] if isinstance(value, (str, bytes, int, float)) else value for name, value in given.items()}


class ChunkReader:
    """Reads the responses of one request: what is new of which answer, and when all have ended.

    Args:
        request: that was sent.

    Attributes:
        says_end: the responses say when an answer ends; otherwise it ends where the stream does.
        finished: every answer has had its last chunk.
    """

    def __init__(self, request: InferRequest) -> None:
        names = {tensor.name for tensor in request.inputs}
        self.says_end = not names.isdisjoint(("return_usage", "return_finish_reason"))
        self.finished = False
        self._ended: set[int] = set()
        self._num_output_tokens: Counter[int] = Counter()  # by answer; a response counts its own

    def read(self, get: GetOutput) -> list[Chunk]:
        """The chunks of one response, in the order of the answers; those that ended before give none.

        Raises:
            ValueError: the response is none of a language model.
        """
        texts = get("text_output")
        if texts is None:
            raise ValueError("the response has no output 'text_output'")
        ends = self._ends(get, len(texts))
        logprobs, token_ids, sums = get("logprobs"), get("token_ids"), get("cumulative_logprob")
        of_prompt = get("prompt_logprobs")
        silent = token_ids is None and logprobs is None
        chunks = []
        for answer, text in enumerate(texts):
            if answer in self._ended:
                continue
            reason, usage = ends.get(answer, (None, None))
            if reason is not None:
                self._ended.add(answer)
            elif silent and not text:
                continue
            chunks.append(
                Chunk(
                    text,
                    answer,
                    reason,
                    usage,
                    json.loads(logprobs[answer]) if logprobs else None,
                    tuple(token_ids) if token_ids is not None else None,
                    sums[answer] if sums else None,
                    json.loads(of_prompt[0]) if of_prompt else None,
                )
            )
        self.finished = len(self._ended) == len(texts)
        return chunks

    def _ends(self, get: GetOutput, count: int) -> dict[int, tuple[str, Usage | None]]:
        """Finish reason and usage of the answers that have ended, by number."""
        ends = get("usage")
        if ends is not None:
            return {answer: _end(json.loads(end)) for answer, end in enumerate(ends) if end}
        self._num_output_tokens.update(dict(enumerate(get("num_output_tokens") or ())))
        reasons = get("finish_reason") or [GOES_ON] * count
        return {
            answer: (reason, self._usage(get, answer)) for answer, reason in enumerate(reasons) if reason != GOES_ON
        }

    def _usage(self, get: GetOutput, answer: int) -> Usage | None:
        prompt, cached = get("num_input_tokens"), get("num_cached_tokens")
        if prompt is None or answer not in self._num_output_tokens:
            return None
        return Usage(int(prompt[answer]), int(self._num_output_tokens[answer]), int(cached[answer]) if cached else 0)


def _end(end: Mapping[str, Any]) -> tuple[str, Usage]:
    return end["finish_reason"], Usage(end["prompt_tokens"], end["completion_tokens"], end["cached_tokens"])
