"""The weights that a decoder needs, by Hugging Face's names, and whether a source has exactly these."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from backends.llm.models.config import DecoderConfig
from compiler.errors import ModelRefused

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_SHOWN = 8


def expected_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shape of each weight, by name, in the order in which the model uses them."""
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, config.hidden_size)}
    layer = _layer_shapes(config)
    for i in range(config.num_hidden_layers):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        shapes[HEAD] = (config.vocab_size, config.hidden_size)
    return shapes


def _layer_shapes(c: DecoderConfig) -> dict[str, tuple[int, ...]]:
    queries, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (c.hidden_size,),
        "self_attn.q_proj.weight": (queries, c.hidden_size),
        "self_attn.k_proj.weight": (keys, c.hidden_size),
        "self_attn.v_proj.weight": (keys, c.hidden_size),
        "self_attn.o_proj.weight": (c.hidden_size, queries),
        "post_attention_layernorm.weight": (c.hidden_size,),
        "mlp.gate_proj.weight": (c.intermediate_size, c.hidden_size),
        "mlp.up_proj.weight": (c.intermediate_size, c.hidden_size),
        "mlp.down_proj.weight": (c.hidden_size, c.intermediate_size),
    }
    if c.attention_bias:
        shapes |= {"self_attn.q_proj.bias": (queries,)}
        shapes |= {f"self_attn.{name}_proj.bias": (keys,) for name in "kv"}
    if c.qk_norm:
        shapes |= {f"self_attn.{name}_norm.weight": (c.head_dim,) for name in "qk"}
    if c.post_norms:
        shapes |= {f"{name}_feedforward_layernorm.weight": (c.hidden_size,) for name in ("pre", "post")}
    return shapes


def check_weights(shown: str, wanted: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> None:
    """Refuses missing, extra and misshapen weights, all by name.

    Args:
        shown: how errors name the source.
        wanted, found: shapes by the source's own names.
    """
    missing = [name for name in wanted if name not in found]
    extra = [name for name in found if name not in wanted]
    problems = [
        *([f"missing: {_some(missing)}"] if missing else []),
        *([f"not in the model: {_some(extra)}"] if extra else []),
    ]
    if problems:
        raise ModelRefused(f"{shown}: the tensors are not those of its config ({len(wanted)}): {'; '.join(problems)}")
    for name, shape in wanted.items():
        if found[name] != shape:
            raise ModelRefused(
                f"{shown}: tensor '{name}' has the shape {list(found[name])}; by the config: {list(shape)}"
            )


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:_SHOWN]) + (f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else "")
