"""SamplingParams: how the tokens of one request are chosen, checked once."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from backends.llm.errors import InvalidRequest
from backends.llm.plain_values import plain_flag, plain_integer, plain_number
from backends.llm.sampling.structured_outputs import StructuredOutputs, structured_outputs_from

MAX_ANSWERS = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
MAX_STOP_TOKENS = 128
MAX_LOGIT_BIAS = 100.0


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens, and when to stop; the names and defaults are vLLM's, except that it is greedy by default.

    Attributes:
        n: answers for each prompt, 1 to 128; each has a random stream of its own.
        temperature: 0 is greedy.
        top_k: 0 or -1 is off, 1 is greedy. top_p, min_p: 1.0 and 0.0 are off.
        repetition_penalty: over prompt and answer, 0.01 to 100.
        presence_penalty, frequency_penalty: over the answer, -2 to 2.
        seed: None takes one from the request's id; the tokens never depend on batch mates or preemption.
        max_tokens: None is as many as the context has room for.
        min_tokens: so many tokens come before a stop token, or before the one that completes a stop string.
        stop: at most 16 strings of 1 to 256 characters that end the answer and are not part of it; one string or a list
            is taken too.
        stop_token_ids: beside the model's own end tokens; at most 128.
        ignore_eos: the model's end tokens do not end the answer.
        logprobs: how many alternatives to report for each token, at most 20; 0 is the chosen one alone, None is none.
        prompt_logprobs: the same for the prompt's tokens.
        include_stop_str_in_output, skip_special_tokens: of the text.
        logit_bias: added to the logits, by token, -100 to 100. None is none, as of the stops.
        structured_outputs: a language that the answer belongs to; the JSON form of `structured_outputs_from` is taken
            too. The answer ends where its grammar is complete, also before `min_tokens`.

    Raises:
        InvalidRequest: a value has the wrong type or is out of range; `param` is the field's name.
    """

    n: int = 1
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    structured_outputs: StructuredOutputs | None = None

    def __post_init__(self) -> None:
        self._take_integer("n", 1, MAX_ANSWERS)
        self._take_number("temperature", 0.0)
        self._take_integer("top_k", -1)
        self._take_number("top_p", 0.0, 1.0, above_low=True)
        self._take_number("min_p", 0.0, 1.0)
        self._take_number("repetition_penalty", 0.01, 100.0)
        self._take_number("presence_penalty", -2.0, 2.0)
        self._take_number("frequency_penalty", -2.0, 2.0)
        if self.seed is not None:
            self._take_integer("seed", -(2**63), 2**63 - 1)
        if self.max_tokens is not None:
            self._take_integer("max_tokens", 1)
        self._take_integer("min_tokens", 0, self.max_tokens)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._take_integer(name, 0, MAX_LOGPROBS)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            flag = plain_flag(getattr(self, name))
            if flag is None:
                raise _refusal(name, getattr(self, name), "true or false")
            object.__setattr__(self, name, flag)
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _stop_tokens(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _logit_bias(self.logit_bias))
        if self.structured_outputs is not None:
            object.__setattr__(self, "structured_outputs", structured_outputs_from(self.structured_outputs))

    @property
    def greedy(self) -> bool:
        """The most likely token is taken; top_k 1 is that by another name."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def check_vocabulary(self, vocab_size: int) -> None:
        """Checks what depends on the model.

        Raises:
            InvalidRequest: a token id is not in the vocabulary.
        """
        for name, token_ids in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            for token_id in token_ids:
                if token_id >= vocab_size:
                    raise _refusal(name, token_id, f"token ids from 0 to {vocab_size - 1}, the model's vocabulary")

    def _take_integer(self, name: str, low: int, high: int | None = None) -> None:
        allowed = f"an integer from {low} to {high}" if high is not None else f"an integer of {low} or more"
        value = plain_integer(getattr(self, name))
        if value is None or value < low or (high is not None and value > high):
            raise _refusal(name, getattr(self, name), allowed)
        object.__setattr__(self, name, value)

    def _take_number(self, name: str, low: float, high: float | None = None, *, above_low: bool = False) -> None:
        allowed = f"a number above {low:g}" if above_low else f"a number of {low:g} or more"
        allowed += "" if high is None else f", up to {high:g}"
        value = plain_number(getattr(self, name))
        # Comparisons alone: NaN fails each of them, and an integer too large for a float is no special case.
        inside = value is not None and low <= value <= (sys.float_info.max if high is None else high)
        if not inside or (above_low and value == low):
            raise _refusal(name, getattr(self, name), allowed)
        object.__setattr__(self, name, value)


def _refusal(name: str, value: object, allowed: str) -> InvalidRequest:
    seen = repr(value)
    if len(seen) > 80:
        seen = seen[:77] + "..."
    return InvalidRequest(f"{name} is {seen}; allowed: {allowed}", param=name)


def _stop_strings(stop: Any) -> tuple[str, ...]:
    allowed = f"up to {MAX_STOP_STRINGS} strings of 1 to {MAX_STOP_CHARACTERS} characters"
    strings = (stop,) if isinstance(stop, str) else () if stop is None else stop
    if not isinstance(strings, Sequence) or len(strings) > MAX_STOP_STRINGS:
        raise _refusal("stop", stop, allowed)
    for text in strings:
        if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_CHARACTERS:
            raise _refusal("stop", text, allowed)
    return tuple(strings)


def _stop_tokens(token_ids: Any) -> tuple[int, ...]:
    allowed = f"up to {MAX_STOP_TOKENS} token ids of 0 or more"
    given = () if token_ids is None else token_ids
    if isinstance(given, str) or not isinstance(given, Sequence | np.ndarray) or len(given) > MAX_STOP_TOKENS:
        raise _refusal("stop_token_ids", token_ids, allowed)
    return tuple(_token_id("stop_token_ids", token_id, allowed) for token_id in given)


def _logit_bias(logit_bias: Any) -> dict[int, float]:
    allowed = f"token ids of 0 or more, each with a number from -{MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}"
    given = {} if logit_bias is None else logit_bias
    if not isinstance(given, Mapping):
        raise _refusal("logit_bias", logit_bias, allowed)
    taken = {}
    for token_id, bias in given.items():
        number = plain_number(bias)
        if number is None or not abs(number) <= MAX_LOGIT_BIAS:
            raise _refusal("logit_bias", bias, allowed)
        taken[_token_id("logit_bias", token_id, allowed)] = number
    return taken


def _token_id(name: str, value: Any, allowed: str) -> int:
    token_id = plain_integer(value)
    if token_id is None or token_id < 0:
        raise _refusal(name, value, allowed)
    return token_id
