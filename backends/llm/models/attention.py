"""Attention written out: the oracle that every other one is compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from backends.llm.models.config import DecoderConfig
from backends.llm.models.decoder import is_windowed


def plain_attention(config: DecoderConfig, layer: int, query: Tensor, key: Tensor, value: Tensor, start: int) -> Tensor:
    """Attends to all tokens of one request, in the order in which the formula has it.

    Args:
        query: [num_tokens, heads, head_dim], the tokens from position `start` on.
        key, value: [start + num_tokens, kv_heads, head_dim], from position 0 on.

    Returns:
        [num_tokens, heads, head_dim]
    """
    groups = config.num_attention_heads // config.num_key_value_heads
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query, key).float() * config.query_scale
    if config.attention_softcap is not None:
        scores = torch.tanh(scores / config.attention_softcap) * config.attention_softcap
    asking = torch.arange(start, start + len(query), device=query.device)[:, None]
    asked = torch.arange(len(key), device=query.device)[None]
    seen = asked <= asking
    if is_windowed(config, layer):
        assert config.sliding_window is not None
        seen &= asked > asking - config.sliding_window
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1).to(value.dtype)
    return torch.einsum("hqk,khd->qhd", weights, value)
