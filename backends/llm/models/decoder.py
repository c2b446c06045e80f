"""The decoder in torch: Llama, Mistral, SmolLM, Qwen2, Qwen3 and Gemma 3 from one DecoderConfig.

Tokens are flat, as in an engine's step, and attention is a function that is passed in and owns keys and values. So the
same code is the oracle (plain attention over all tokens), the paged reference and the CUDA model.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from backends.llm.loaders.base import LoadedModel
from backends.llm.models import names
from backends.llm.models.config import DecoderConfig
from backends.llm.models.rope import rotation
from backends.llm.models.weights import values


class Attend(Protocol):
    """Attention of one layer, with the rotated queries and keys of this step's tokens."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Returns [num_tokens, heads, head_dim] for the query of that shape; keys and values have kv_heads instead."""
        ...


class Decoder:
    """Weights on a device, and the function from tokens to logits."""

    def __init__(self, model: LoadedModel, *, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
        """Reads all weights; those that share their input are put together (q, k, v; gate, up)."""
        self.config = model.config
        self._rotations = {w: _Rotary(model.config, w, device) for w in (False, True)}
        self._model, self._dtype, self._device = model, dtype, device
        self._embedding = self._read(names.EMBEDDING)
        self._head = self._embedding if model.config.tie_word_embeddings else self._read(names.HEAD)
        self._norm = self._read_norm(names.FINAL_NORM)
        self._layers = [_Layer(self, i) for i in range(model.config.num_hidden_layers)]
        del self._model

    def __call__(self, input_ids: Tensor, position_ids: Tensor, attend: Attend, rows: Tensor) -> Tensor:
        """Computes one step.

        Args:
            input_ids, position_ids: [num_tokens] int64.
            attend: called once for each layer, in order.
            rows: [num_logits] int64, the tokens whose logits are wanted.

        Returns:
            [num_logits, vocab_size] float32.
        """
        hidden = functional.embedding(input_ids, self._embedding) * self.config.embedding_scale
        turns = {w: rotary.at(position_ids, self._dtype) for w, rotary in self._rotations.items()}
        for index, layer in enumerate(self._layers):
            hidden = layer(hidden, turns[is_windowed(self.config, index)], attend)
        hidden = self.rms_norm(hidden[rows], self._norm)
        logits = functional.linear(hidden, self._head).float()
        cap = self.config.logits_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def rms_norm(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """Root mean square norm over the last dim, in float32."""
        wide = hidden.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return (wide * weight).to(hidden.dtype)

    def _read(self, *stored: str) -> Tensor:
        """Returns the rows of the weights named, one after the other."""
        arrays = [values(self._model.weights[name]) for name in stored]
        return torch.from_numpy(np.concatenate(arrays)).to(self._device, self._dtype)

    def _read_norm(self, name: str) -> Tensor:
        weight = values(self._model.weights[name]) + np.float32(self.config.norm_offset)
        return torch.from_numpy(weight).to(self._device)

    def _has(self, name: str) -> bool:
        return name in self._model.weights


class _Layer:
    """The weights of one layer and how they are used."""

    def __init__(self, decoder: Decoder, index: int) -> None:
        self._decoder, self._config, self._index = decoder, decoder.config, index
        prefix, config = names.layer(index), decoder.config

        def read(*parts: str) -> Tensor:
            return decoder._read(*(prefix + part for part in parts))

        def norm(name: str) -> Tensor:
            return decoder._read_norm(f"{prefix}{name}.weight")

        self._qkv = read(*(f"{part}.weight" for part in names.QKV))
        self._qkv_bias = read(*(f"{part}.bias" for part in names.QKV)) if config.attention_bias else None
        self._output = read("self_attn.o_proj.weight")
        self._gate_up = read(*(f"{part}.weight" for part in names.GATE_UP))
        self._down = read("mlp.down_proj.weight")
        self._head_norms = [norm("self_attn.q_norm"), norm("self_attn.k_norm")] if config.qk_norm else []
        self._input_norm, self._attention_norm = norm("input_layernorm"), norm("post_attention_layernorm")
        if config.post_norms:
            self._mlp_norms = norm("pre_feedforward_layernorm"), norm("post_feedforward_layernorm")

    def __call__(self, hidden: Tensor, turn: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        norm = self._decoder.rms_norm
        attended = self._attention(norm(hidden, self._input_norm), turn, attend)
        if not self._config.post_norms:
            hidden = hidden + attended
            return hidden + self._mlp(norm(hidden, self._attention_norm))
        hidden = hidden + norm(attended, self._attention_norm)
        before, after = self._mlp_norms
        return hidden + norm(self._mlp(norm(hidden, before)), after)

    def _attention(self, hidden: Tensor, turn: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        c = self._config
        qkv = functional.linear(hidden, self._qkv, self._qkv_bias).unflatten(-1, (-1, c.head_dim))
        query, key, value = qkv.split([c.num_attention_heads, c.num_key_value_heads, c.num_key_value_heads], dim=1)
        if self._head_norms:
            query, key = (self._decoder.rms_norm(x, w) for x, w in zip((query, key), self._head_norms, strict=True))
        attended = attend(self._index, _rotated(query, *turn), _rotated(key, *turn), value)
        return functional.linear(attended.flatten(1), self._output)

    def _mlp(self, hidden: Tensor) -> Tensor:
        gate, up = functional.linear(hidden, self._gate_up).chunk(2, dim=-1)
        active = (
            functional.silu(gate) if self._config.hidden_act == "silu" else functional.gelu(gate, approximate="tanh")
        )
        return functional.linear(active * up, self._down)


class _Rotary:
    """Cosine and sine of positions."""

    def __init__(self, config: DecoderConfig, windowed: bool, device: str) -> None:
        how = rotation(config, windowed=windowed)
        self._frequencies = torch.from_numpy(how.frequencies).to(device)
        self._magnitude = how.magnitude

    def at(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns cosine and sine, [num_tokens, 1, head_dim] each."""
        angles = (position_ids[:, None].float() * self._frequencies).repeat(1, 2)[:, None]
        return (angles.cos() * self._magnitude).to(dtype), (angles.sin() * self._magnitude).to(dtype)


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat((-second, first), dim=-1) * sin


def is_windowed(config: DecoderConfig, layer: int) -> bool:
    """Whether a layer sees the last `sliding_window` tokens only."""
    return config.sliding_window is not None and bool(config.windowed_layers) and config.windowed_layers[layer]
