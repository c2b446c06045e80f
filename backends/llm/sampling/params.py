"""SamplingParams: how the tokens of one request are chosen, checked once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens, and when to stop; the names and defaults are vLLM's, except that it is greedy by default.

    Attributes:
        n: answers for each prompt; answer i uses seed + i.
        temperature: 0 is greedy.
        top_k: 0 is off. top_p, min_p: 1.0 and 0.0 are off.
        repetition_penalty: over prompt and answer; presence_penalty, frequency_penalty: over the answer.
        seed: None takes one from the request's id; the tokens never depend on batch mates or preemption.
        max_tokens: None is as many as the context has room for.
        min_tokens: before it, neither a stop token nor a stop string ends the answer.
        stop: strings that end the answer and are not part of it.
        stop_token_ids: beside the model's own end tokens.
        ignore_eos: the model's end tokens do not end the answer.
        logprobs: how many alternatives to report for each token; 0 is the chosen one alone, None is none.
        prompt_logprobs: the same for the prompt's tokens.
        include_stop_str_in_output, skip_special_tokens: of the text.
        logit_bias: added to the logits, by token.
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
    logit_bias: Mapping[int, float] = field(default_factory=dict)
