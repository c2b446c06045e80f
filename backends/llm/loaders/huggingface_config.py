"""From a Hugging Face config.json to DecoderConfig: what our decoder has no part for is refused by its key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from backends.llm.models.config import DecoderConfig, RopeScaling
from compiler.errors import ModelRefused, one_of

MODEL_TYPES = {"llama": "llama", "mistral": "mistral", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3_text": "gemma3"}
MAX_LAYERS = 1 << 10
_WINDOWED = "sliding_attention"
# What transformers' classes take where a config.json does not say.
_MISTRAL_WINDOW, _GEMMA_PATTERN, _QWEN_WINDOW_LAYERS = 4096, 6, 28
# A Gemma 3 that also sees images keeps the language model's keys in a section, and leaves out those that are its
# class's defaults.
_WITH_IMAGES, _TEXT = "gemma3", "text_config"
_GEMMA_DEFAULTS = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
}
# Keys that must have this value, or be missing: the decoder has no part for others.
_FIXED: dict[str, object] = {
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "use_bidirectional_attention": False,
}


@dataclass(frozen=True)
class _Keys:
    """A config's values, asked for by type; `shown` is how errors name the file."""

    shown: str
    values: Mapping[str, Any]

    def refuse(self, key: str, allowed: str) -> NoReturn:
        value = self.values.get(key)
        seen = "is missing" if value is None else f"is {str(value)[:80]!r}"
        raise ModelRefused(f"{self.shown}: '{key}' {seen}; wanted: {allowed}")

    def integer(self, key: str, *, default: int | None = None, high: int = 1 << 31) -> int:
        value = self.values.get(key)
        value = default if value is None else value
        if type(value) is not int or not 1 <= value <= high:
            self.refuse(key, f"an integer from 1 to {high}")
        return value

    def number(self, key: str, *, default: float | None = None) -> float:
        """Returns a finite number above 0."""
        value = self.values.get(key)
        value = default if value is None else value
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:  # type: ignore[arg-type,operator]
            self.refuse(key, "a finite number above 0")
        return float(value)  # type: ignore[arg-type]

    def flag(self, key: str, *, default: bool) -> bool:
        value = self.values.get(key)
        value = default if value is None else value
        if not isinstance(value, bool):
            self.refuse(key, "true or false")
        return value

    def section(self, key: str) -> _Keys:
        value = self.values.get(key)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            self.refuse(key, "an object")
        return _Keys(f"{self.shown}: '{key}'", value)


def config_from_huggingface(values: Mapping[str, Any], shown: str) -> DecoderConfig:
    """Returns the configuration that a config.json describes; of a model that sees images, its language model's.

    Raises:
        ModelRefused: another model type, a key that is missing or out of range, or a feature that is not supported.
    """
    c = _Keys(shown, values)
    if values.get("model_type") == _WITH_IMAGES:
        text = c.section(_TEXT)
        c = _Keys(text.shown, {**_GEMMA_DEFAULTS, **text.values, "model_type": "gemma3_text"})
    values, kind = c.values, c.values.get("model_type")
    if not isinstance(kind, str) or kind not in MODEL_TYPES:
        c.refuse("model_type", one_of([*MODEL_TYPES, _WITH_IMAGES]))
    for key, wanted in _FIXED.items():
        if values.get(key) not in (None, wanted):
            c.refuse(key, f"{wanted}: the decoder has no other")
    architecture = MODEL_TYPES[kind]
    if architecture != "qwen2" and c.flag("attention_bias", default=False):
        c.refuse("attention_bias", "false: the decoder has no bias after attention")
    heads, hidden = c.integer("num_attention_heads"), c.integer("hidden_size")
    layers = c.integer("num_hidden_layers", high=MAX_LAYERS)
    head_dim = _head_dim(c, hidden, heads)
    gemma = architecture == "gemma3"
    window, windowed = _windows(c, architecture, layers)
    rope_theta, rope_scaling, local_rope_theta = _rope(c, gemma)
    return DecoderConfig(
        architecture=architecture,
        vocab_size=c.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=c.integer("intermediate_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=_kv_heads(c, architecture, heads),
        head_dim=head_dim,
        max_position_embeddings=c.integer("max_position_embeddings"),
        rms_norm_eps=c.number("rms_norm_eps", default=1e-6),
        rope_theta=rope_theta,
        query_scale=(c.number("query_pre_attn_scalar", default=256) if gemma else head_dim) ** -0.5,
        rope_scaling=rope_scaling,
        local_rope_theta=local_rope_theta,
        sliding_window=window,
        windowed_layers=windowed,
        hidden_act=_activation(c, gemma),
        qk_norm=architecture in ("qwen3", "gemma3"),
        attention_bias=architecture == "qwen2",
        post_norms=gemma,
        norm_offset=1.0 if gemma else 0.0,
        embedding_scale=hidden**0.5 if gemma else 1.0,
        attention_softcap=_softcap(c, "attn_logit_softcapping") if gemma else None,
        logits_softcap=_softcap(c, "final_logit_softcapping") if gemma else None,
        tie_word_embeddings=c.flag("tie_word_embeddings", default=gemma),
    )


def _softcap(c: _Keys, key: str) -> float | None:
    return c.number(key) if c.values.get(key) is not None else None


def _head_dim(c: _Keys, hidden: int, heads: int) -> int:
    if c.values.get("head_dim") is None and hidden % heads:
        c.refuse("head_dim", f"a width of a head, since {heads} heads do not divide hidden_size {hidden}")
    head_dim = c.integer("head_dim", default=hidden // heads, high=1 << 12)
    if head_dim % 2:
        c.refuse("head_dim", "an even number")
    return head_dim


def _kv_heads(c: _Keys, architecture: str, heads: int) -> int:
    """Returns the heads of keys and values; only old Llamas, which have as many as of queries, do not say."""
    count = c.integer("num_key_value_heads", default=heads if architecture == "llama" else None)
    if heads % count:
        c.refuse("num_key_value_heads", f"a divisor of the {heads} heads")
    return count


def _activation(c: _Keys, gemma: bool) -> str:
    key, wanted, name = (
        ("hidden_activation", "gelu_pytorch_tanh", "gelu_tanh") if gemma else ("hidden_act", "silu", "silu")
    )
    if c.values.get(key, wanted) != wanted:
        c.refuse(key, wanted)
    return name


def _windows(c: _Keys, architecture: str, layers: int) -> tuple[int | None, tuple[bool, ...]]:
    """Returns the sliding window, and for each layer whether it has one; nothing where no layer has."""
    if architecture == "llama":
        return None, ()
    if architecture == "mistral":
        if c.values.get("sliding_window", _MISTRAL_WINDOW) is None:
            return None, ()
        return c.integer("sliding_window", default=_MISTRAL_WINDOW), (True,) * layers
    types = c.values.get("layer_types")
    if types is not None:
        allowed = (_WINDOWED, "full_attention")
        if not isinstance(types, list) or len(types) != layers or any(t not in allowed for t in types):
            c.refuse("layer_types", f"{layers} of {one_of(allowed)}")
        windowed = tuple(t == _WINDOWED for t in types)
    elif architecture == "gemma3":
        pattern = c.integer("sliding_window_pattern", default=_GEMMA_PATTERN)
        windowed = tuple((i + 1) % pattern != 0 for i in range(layers))
    else:
        first = c.values.get("max_window_layers", _QWEN_WINDOW_LAYERS)
        if type(first) is not int or first < 0:
            c.refuse("max_window_layers", "an integer from 0")
        uses = c.flag("use_sliding_window", default=False) and c.values.get("sliding_window") is not None
        windowed = tuple(uses and i >= first for i in range(layers))
    return (c.integer("sliding_window"), windowed) if any(windowed) else (None, ())


def _rope(c: _Keys, gemma: bool) -> tuple[float, RopeScaling | None, float | None]:
    """Returns theta, scaling, and the theta of windowed layers where that is another."""
    parameters = c.section("rope_parameters")  # since transformers 5; before: rope_scaling, rope_theta
    default, local = (1e6, 1e4) if gemma else (1e4, None)
    if gemma and "full_attention" in parameters.values:
        sliding = parameters.section(_WINDOWED)
        if _rope_kind(sliding) != "default":
            sliding.refuse("rope_type", "default")
        local = sliding.number("rope_theta", default=local)
        full = parameters.section("full_attention")
    else:
        local = c.number("rope_local_base_freq", default=local) if local else None
        full = parameters if parameters.values else c.section("rope_scaling")
    theta = full.number("rope_theta", default=c.number("rope_theta", default=default))
    if full.values.get("partial_rotary_factor") not in (None, 1.0):
        full.refuse("partial_rotary_factor", "1.0: the decoder has no other")
    return theta, _scaling(full, c.integer("max_position_embeddings")), local


def _rope_kind(rope: _Keys) -> str:
    return str(rope.values.get("rope_type", rope.values.get("type", "default")))


def _scaling(rope: _Keys, max_positions: int) -> RopeScaling | None:
    kind = _rope_kind(rope)
    if kind == "default":
        return None
    if kind in ("linear", "dynamic"):
        return RopeScaling(kind=kind, factor=rope.number("factor"))
    if kind == "llama3":
        return RopeScaling(
            kind=kind,
            factor=rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_max_position_embeddings=rope.integer("original_max_position_embeddings", default=max_positions),
        )
    if kind == "yarn":
        for key, wanted in {"mscale": None, "mscale_all_dim": None, "truncate": True}.items():
            if rope.values.get(key, wanted) not in (None, wanted):
                rope.refuse(key, "nothing: it is not supported")
        return RopeScaling(
            kind=kind,
            factor=rope.number("factor"),
            low_freq_factor=rope.number("beta_slow", default=1.0),
            high_freq_factor=rope.number("beta_fast", default=32.0),
            original_max_position_embeddings=rope.integer("original_max_position_embeddings", default=max_positions),
            attention_factor=rope.number("attention_factor") if rope.values.get("attention_factor") else None,
        )
    rope.refuse("rope_type", "default, dynamic, linear, llama3 or yarn")
