"""From a GGUF file's metadata to DecoderConfig, and from Hugging Face's names to the file's."""

from __future__ import annotations

import numpy as np

from backends.llm.loaders.gguf_file import GgufFile
from backends.llm.loaders.gguf_metadata import Metadata
from backends.llm.loaders.shapes import EMBEDDING, HEAD
from backends.llm.models.config import DecoderConfig, RopeScaling
from compiler.errors import ModelRefused, one_of

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")
ROPE_FREQS = "rope_freqs.weight"
MAX_LAYERS = 1 << 10
# What llama.cpp's Gemma 3 has in its code, since the metadata of most files lacks it.
_GEMMA_PATTERN, _GEMMA_LOCAL_THETA, _GEMMA_27B_LAYERS = 6, 10_000.0, 62

_GLOBAL = {EMBEDDING: "token_embd.weight", "model.norm.weight": "output_norm.weight", HEAD: "output.weight"}
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def gguf_name(name: str, config: DecoderConfig) -> str:
    """Returns what GGUF calls a weight of Hugging Face's name."""
    if name in _GLOBAL:
        return _GLOBAL[name]
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    part, _, kind = rest.rpartition(".")
    if part == "post_attention_layernorm":  # before the MLP in a Llama, after the attention in a Gemma
        return f"blk.{layer}.{'post_attention_norm' if config.post_norms else 'ffn_norm'}.{kind}"
    return f"blk.{layer}.{_LAYER[part]}.{kind}"


def config_from_gguf(file: GgufFile) -> DecoderConfig:
    """Returns the configuration.

    Raises:
        ModelRefused: another architecture, a key that is missing or out of range, or a feature that is not supported.
    """
    m = file.metadata
    arch = m.text("general.architecture")
    if arch not in ARCHITECTURES:
        m.refuse("general.architecture", one_of(ARCHITECTURES))
    if (parts := m.integer("split.count", default=1)) > 1:
        raise ModelRefused(
            f"{m.shown} is one of {parts} files of a model", hint="join them: llama-gguf-split --merge FIRST WHOLE.gguf"
        )
    if m.integer(f"{arch}.expert_count", default=0):
        m.refuse(f"{arch}.expert_count", "0: mixtures of experts are not supported")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelRefused(f"{file.shown}: the tensor 'token_embd.weight' of two dims is missing")
    heads = m.integer(f"{arch}.attention.head_count", low=1)
    hidden = m.integer(f"{arch}.embedding_length", low=1)
    layers = m.integer(f"{arch}.block_count", low=1, high=MAX_LAYERS)
    head_dim = _head_dim(m, arch, hidden, heads)
    gemma = arch == "gemma3"
    window = m.integer(f"{arch}.attention.sliding_window", default=0) or None
    return DecoderConfig(
        architecture=arch,
        vocab_size=embedding.shape[0],
        hidden_size=hidden,
        intermediate_size=m.integer(f"{arch}.feed_forward_length", low=1),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=_kv_heads(m, arch, heads),
        head_dim=head_dim,
        max_position_embeddings=m.integer(f"{arch}.context_length", low=1),
        rms_norm_eps=m.number(f"{arch}.attention.layer_norm_rms_epsilon"),
        rope_theta=m.number(f"{arch}.rope.freq_base", default=10_000.0),
        query_scale=(hidden / heads if gemma and layers == _GEMMA_27B_LAYERS else head_dim) ** -0.5,
        rope_scaling=_rope_scaling(file, arch, head_dim),
        local_rope_theta=m.number(f"{arch}.rope.freq_base_swa", default=_GEMMA_LOCAL_THETA) if gemma else None,
        sliding_window=window,
        windowed_layers=_windowed(m, arch, layers) if window else (),
        hidden_act="gelu_tanh" if gemma else "silu",
        qk_norm=arch in ("qwen3", "gemma3"),
        attention_bias=arch == "qwen2" or "blk.0.attn_q.bias" in file.tensors,
        post_norms=gemma,
        norm_offset=1.0 if gemma else 0.0,
        embedding_scale=hidden**0.5 if gemma else 1.0,
        logits_softcap=m.number(f"{arch}.final_logit_softcapping") if f"{arch}.final_logit_softcapping" in m else None,
        tie_word_embeddings="output.weight" not in file.tensors,
    )


def _head_dim(m: Metadata, arch: str, hidden: int, heads: int) -> int:
    """Returns the width of a head, the same for keys and values, all of which is rotated."""
    key = f"{arch}.attention.key_length"
    if key not in m and hidden % heads:
        m.refuse(key, f"a width of a head, since {heads} heads do not divide embedding_length {hidden}")
    head_dim = m.integer(key, default=hidden // heads, low=2, high=1 << 12)
    if head_dim % 2:
        m.refuse(key, "an even number")
    for other in (f"{arch}.attention.value_length", f"{arch}.rope.dimension_count"):
        if m.integer(other, default=head_dim) != head_dim:
            m.refuse(other, f"{head_dim}, as the keys")
    return head_dim


def _kv_heads(m: Metadata, arch: str, heads: int) -> int:
    key = f"{arch}.attention.head_count_kv"
    count = m.integer(key, default=heads, low=1)
    if heads % count:
        m.refuse(key, f"a divisor of the {heads} heads")
    return count


def _windowed(m: Metadata, arch: str, layers: int) -> tuple[bool, ...]:
    if arch != "gemma3":
        return (True,) * layers
    pattern = m.integer("gemma3.attention.sliding_window_pattern", default=_GEMMA_PATTERN, low=1, high=layers + 1)
    return tuple((i + 1) % pattern != 0 for i in range(layers))


def _rope_scaling(file: GgufFile, arch: str, head_dim: int) -> RopeScaling | None:
    """Returns the scaling: of the tensor with a divisor for each frequency (Llama 3), or of the metadata."""
    m, prefix = file.metadata, f"{arch}.rope.scaling"
    kind = m.text(f"{prefix}.type", default="none")
    if ROPE_FREQS in file.tensors:
        return RopeScaling(kind="divisors", factor=1.0, divisors=_divisors(file, head_dim))
    if kind == "none":
        # How old files say it.
        factor = m.number(f"{arch}.rope.scale_linear", default=1.0)
        return RopeScaling(kind="linear", factor=factor) if factor != 1.0 else None
    factor = m.number(f"{prefix}.factor", default=1.0)
    if kind == "linear":
        return RopeScaling(kind="linear", factor=factor)
    if kind == "yarn":
        attention = m.number(f"{prefix}.attn_factor", default=1.0) * (1 + 0.1 * float(np.log(factor)))
        return RopeScaling(
            kind="yarn",
            factor=factor,
            low_freq_factor=m.number(f"{prefix}.yarn_beta_slow", default=1.0),
            high_freq_factor=m.number(f"{prefix}.yarn_beta_fast", default=32.0),
            original_max_position_embeddings=m.integer(f"{prefix}.original_context_length", low=1),
            attention_factor=attention,
        )
    m.refuse(f"{prefix}.type", "none, linear or yarn")


def _divisors(file: GgufFile, head_dim: int) -> tuple[float, ...]:
    info = file.tensors[ROPE_FREQS]
    values = file.read(ROPE_FREQS).view("<f4") if info.type.name == "F32" else np.empty(0, np.float32)
    if info.shape != (head_dim // 2,) or not np.all(np.isfinite(values) & (values > 0)):
        raise ModelRefused(
            f"{file.shown}: tensor '{ROPE_FREQS}' is {info.type.name} {list(info.shape)}; "
            f"wanted: F32 [{head_dim // 2}], all finite and above 0"
        )
    return tuple(float(v) for v in values)
