"""Names of weights, as Hugging Face's checkpoints have them."""

from __future__ import annotations

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
GATE_UP = ("mlp.gate_proj", "mlp.up_proj")


def layer(index: int) -> str:
    """Returns what the names of a layer's weights start with."""
    return f"model.layers.{index}."
