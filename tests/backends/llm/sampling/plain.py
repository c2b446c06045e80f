"""Sampling the plain slow way: loops over the vocabulary in float64, one step after the other as the documents say."""

from __future__ import annotations

import math
from collections.abc import Sequence

from backends.llm.sampling.params import SamplingParams


def adjusted(
    logits: Sequence[float],
    params: SamplingParams,
    prompt: Sequence[int],
    answer: Sequence[int],
    stop_token_ids: Sequence[int] = (),
    allowed: Sequence[bool] | None = None,
) -> list[float]:
    """Grammar, ban of stop tokens, logit bias, penalties."""
    values = [float(value) for value in logits]
    for token_id in range(len(values)):
        if allowed is not None and not allowed[token_id]:
            values[token_id] = -math.inf
        if len(answer) < params.min_tokens and token_id in stop_token_ids:
            values[token_id] = -math.inf
        values[token_id] += params.logit_bias.get(token_id, 0.0)
        if token_id in prompt or token_id in answer:
            factor = params.repetition_penalty
            values[token_id] = values[token_id] / factor if values[token_id] > 0 else values[token_id] * factor
        values[token_id] -= params.frequency_penalty * answer.count(token_id)
        values[token_id] -= params.presence_penalty * (token_id in answer)
    return values


def probabilities(logits: Sequence[float], params: SamplingParams) -> dict[int, float]:
    """Temperature, min-p, top-k, top-p; the tokens that are left and their probabilities."""
    order = sorted(range(len(logits)), key=lambda token_id: (-logits[token_id], token_id))
    left = _normalised({i: math.exp((logits[i] - logits[order[0]]) / params.temperature) for i in order})
    left = _normalised({i: p for i, p in left.items() if p >= params.min_p * left[order[0]]})
    if params.top_k > 0:
        left = _normalised(dict(list(left.items())[: params.top_k]))
    nucleus: dict[int, float] = {}
    for token_id, probability in left.items():
        if params.top_p < 1 and sum(nucleus.values()) >= params.top_p:
            break
        nucleus[token_id] = probability
    return _normalised(nucleus)


def _normalised(weights: dict[int, float]) -> dict[int, float]:
    total = sum(weights.values())
    return {token_id: weight / total for token_id, weight in weights.items() if weight > 0}
