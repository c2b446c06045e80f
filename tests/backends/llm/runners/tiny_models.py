"""Random tiny models of every architecture: as `transformers` has them, and as our LoadedModel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from backends.llm.loaders.base import DenseWeight, LoadedModel
from backends.llm.models.config import DecoderConfig, RopeScaling

VOCAB, HIDDEN, MLP, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 131, 64, 96, 3, 4, 2, 32
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}


@dataclass(frozen=True)
class TinyModel:
    """One architecture: the class in transformers, its config's keys, and ours that differ from the defaults."""

    architecture: str
    theirs: dict[str, Any]
    ours: dict[str, Any]


def _rope(kind: str, factor: float, **keys: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, "factor": factor, **keys}}


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
THETA = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
GEMMA_LAYERS = ["sliding_attention", "sliding_attention", "full_attention"]
MODELS = {
    "llama": TinyModel("llama", {**THETA, "tie_word_embeddings": False}, {}),
    "smollm": TinyModel("llama", {**THETA, "tie_word_embeddings": True}, {"tie_word_embeddings": True}),
    "llama3": TinyModel(
        "llama", _rope("llama3", 8.0, **LLAMA3), {"rope_scaling": RopeScaling(kind="llama3", factor=8.0, **LLAMA3)}
    ),
    "linear": TinyModel("llama", _rope("linear", 4.0), {"rope_scaling": RopeScaling(kind="linear", factor=4.0)}),
    "yarn": TinyModel(
        "qwen2",
        _rope("yarn", 4.0, original_max_position_embeddings=64),
        {
            "rope_scaling": RopeScaling("yarn", 4.0, 1.0, 32.0, original_max_position_embeddings=64),
            "attention_bias": True,
        },
    ),
    "mistral": TinyModel(
        "mistral", {**THETA, "sliding_window": 24}, {"sliding_window": 24, "windowed_layers": (True,) * LAYERS}
    ),
    "qwen2": TinyModel("qwen2", THETA, {"attention_bias": True}),
    "qwen3": TinyModel("qwen3", THETA, {"qk_norm": True}),
    "gemma3": TinyModel(
        "gemma3",
        {
            "query_pre_attn_scalar": 48,
            "sliding_window": 24,
            "layer_types": GEMMA_LAYERS,
            "final_logit_softcapping": 20.0,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
        {
            "query_scale": 48**-0.5,
            "rope_theta": 1e6,
            "rope_scaling": RopeScaling(kind="linear", factor=8.0),
            "local_rope_theta": 10000.0,
            "sliding_window": 24,
            "windowed_layers": (True, True, False),
            "hidden_act": "gelu_tanh",
            "qk_norm": True,
            "post_norms": True,
            "norm_offset": 1.0,
            "embedding_scale": HIDDEN**0.5,
            "logits_softcap": 20.0,
            "tie_word_embeddings": True,
        },
    ),
}


def build(name: str, head_dim: int = HEAD_DIM) -> tuple[torch.nn.Module, LoadedModel]:
    """Returns the model of transformers in float32, and ours with the same weights."""
    import transformers as hf

    classes = {
        "llama": (hf.LlamaConfig, hf.LlamaForCausalLM),
        "mistral": (hf.MistralConfig, hf.MistralForCausalLM),
        "qwen2": (hf.Qwen2Config, hf.Qwen2ForCausalLM),
        "qwen3": (hf.Qwen3Config, hf.Qwen3ForCausalLM),
        "gemma3": (hf.Gemma3TextConfig, hf.Gemma3ForCausalLM),
    }
    tiny = MODELS[name]
    make_config, make_model = classes[tiny.architecture]
    torch.manual_seed(7)
    sizes = {**SIZES, "head_dim": head_dim}
    config = make_config(**{**sizes, **tiny.theirs}, attn_implementation="eager")
    theirs = make_model(config).eval()
    with torch.no_grad():  # the default initialisation is so small that attention hardly matters
        for key, parameter in theirs.named_parameters():
            spread = 0.5 if "norm" in key or "bias" in key else 0.15
            parameter.add_(torch.randn(parameter.shape) * spread)
    fields = {"rope_theta": 10000.0, "query_scale": head_dim**-0.5, **sizes, **tiny.ours}
    state = {key: DenseWeight(value.numpy()) for key, value in theirs.state_dict().items()}
    return theirs, LoadedModel(DecoderConfig(architecture=tiny.architecture, **fields), state, "F32", {})


def their_logits(model: torch.nn.Module, token_ids: list[int]) -> torch.Tensor:
    """Returns [num_tokens, vocab] of one sequence without a cache."""
    with torch.inference_mode():
        return model(torch.tensor([token_ids]), use_cache=False).logits[0]
