"""The decoder as an OpenVINO graph over flat tokens and paged caches.

It is built from the configuration, node by node: nothing is traced, so no torch is needed and weights go from the
file into the graph once. What the CPU plugin fuses (RMSNorm, rotary embedding, compressed products) is written in the
form that it recognises. `decoder.py` is the same model in torch; the tests compare both with `transformers`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import openvino as ov
import openvino.opset15 as ops

from backends.llm.loaders.base import DenseWeight, LoadedModel, Weight
from backends.llm.models import names
from backends.llm.models.config import DecoderConfig
from backends.llm.models.rope import rotation
from backends.llm.models.weights import stack, values
from backends.llm.runners.cpu_options import WeightFormat
from backends.llm.runners.openvino.attention import PagedInputs, paged_attention
from backends.llm.runners.openvino.constants import constant, embedding_rows, matrix
from backends.llm.runners.openvino.forms import converted, with_sums
from compiler.errors import ModelRefused

if TYPE_CHECKING:
    import numpy.typing as npt


def build_graph(model: LoadedModel, form: WeightFormat) -> ov.Model:
    """Returns the graph; its inputs are the fields of StepInputs and key_cache.N, value_cache.N for each layer.

    Raises:
        ModelRefused: the model caps its attention scores, which OpenVINO's paged attention cannot.
    """
    if model.config.attention_softcap is not None:
        raise ModelRefused(
            f"attention_softcap is {model.config.attention_softcap}; OpenVINO's paged attention has no cap",
            hint="use the torch runner",
        )
    return _Builder(model, form).build()


@dataclass(frozen=True)
class _Rotary:
    """Cosine and sine of each token's angles: [num_tokens, 1, 1, head_dim]."""

    cos: ov.Node
    sin: ov.Node


class _Builder:
    """Holds what every layer needs: the configuration, the weights, the inputs."""

    def __init__(self, model: LoadedModel, form: WeightFormat) -> None:
        self.config = model.config
        self._weights = model.weights
        self._form = form
        self._inputs = PagedInputs.create()

    def build(self) -> ov.Model:
        c = self.config
        hidden = embedding_rows(self._weights[names.EMBEDDING], self._inputs.input_ids)
        if c.embedding_scale != 1.0:
            hidden = ops.multiply(hidden, constant(np.float32(c.embedding_scale)))
        everything = _rotary(c, self._inputs, windowed=False)
        windowed = _rotary(c, self._inputs, windowed=True) if any(c.windowed_layers) else everything
        for index in range(c.num_hidden_layers):
            in_window = bool(c.windowed_layers) and c.windowed_layers[index] and c.sliding_window is not None
            hidden = self._layer(index, hidden, windowed if in_window else everything, in_window)
        # Only the rows that were asked for reach the head, which is a fifth of a small model's work.
        rows = ops.gather(hidden, self._inputs.logits_indices, constant(np.int32(0)))
        head = names.EMBEDDING if c.tie_word_embeddings else names.HEAD
        logits = self._product(self._norm(rows, names.FINAL_NORM), converted(self._weights[head], self._form))
        logits = _capped(logits, c.logits_softcap)
        result = ops.result(logits)
        result.output(0).get_tensor().set_names({"logits"})
        return ov.Model([result], self._inputs.parameters(), "decoder")

    def _layer(self, index: int, hidden: ov.Node, rotary: _Rotary, in_window: bool) -> ov.Node:
        prefix = names.layer(index)
        after_attention, before_mlp = (
            prefix + "post_attention_layernorm.weight",
            prefix + "pre_feedforward_layernorm.weight",
        )
        attended = self._attention(index, self._norm(hidden, prefix + "input_layernorm.weight"), rotary, in_window)
        if not self.config.post_norms:
            hidden = ops.add(hidden, attended)
            return ops.add(hidden, self._mlp(prefix, self._norm(hidden, after_attention)))
        hidden = ops.add(hidden, self._norm(attended, after_attention))
        mlp = self._mlp(prefix, self._norm(hidden, before_mlp))
        return ops.add(hidden, self._norm(mlp, prefix + "post_feedforward_layernorm.weight"))

    def _attention(self, index: int, hidden: ov.Node, rotary: _Rotary, in_window: bool) -> ov.Node:
        c, prefix = self.config, names.layer(index)
        heads, kv_heads, width = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        qkv = self._linear(prefix, names.QKV, hidden)
        if c.qk_norm:
            q, k, value = _split(qkv, 1, [heads * width, kv_heads * width, kv_heads * width])
            query = _rotated(self._norm(_per_head(q, heads, width), prefix + "self_attn.q_norm.weight"), rotary, width)
            key = _rotated(self._norm(_per_head(k, kv_heads, width), prefix + "self_attn.k_norm.weight"), rotary, width)
        else:  # queries and keys are rotated in one node
            qk, value = _split(qkv, 1, [(heads + kv_heads) * width, kv_heads * width])
            both = _rotated(_per_head(qk, heads + kv_heads, width), rotary, width)
            query, key = _split(both, 1, [heads, kv_heads])
        window = c.sliding_window if in_window and c.sliding_window is not None else 0
        attended = paged_attention(self._inputs, c, index, _flat(query), _flat(key), value, window)
        return self._linear(prefix, ("self_attn.o_proj",), attended)

    def _mlp(self, prefix: str, hidden: ov.Node) -> ov.Node:
        width = self.config.intermediate_size
        gate, up = _split(self._linear(prefix, names.GATE_UP, hidden), 1, [width, width])
        active = ops.swish(gate) if self.config.hidden_act == "silu" else ops.gelu(gate, "tanh")
        return self._linear(prefix, ("mlp.down_proj",), ops.multiply(active, up))

    def _linear(self, prefix: str, parts: tuple[str, ...], hidden: ov.Node | ov.Output) -> ov.Node:
        """Returns several products of one input side by side, as one product where their weights are stored alike."""
        weights = [converted(self._weights[f"{prefix}{part}.weight"], self._form) for part in parts]
        together = stack(weights)
        if together is not None:
            result = self._product(hidden, together)
        else:
            result = ops.concat([self._product(hidden, w) for w in weights], 1)
        if f"{prefix}{parts[0]}.bias" not in self._weights:
            return result
        biases = np.concatenate([values(self._weights[f"{prefix}{part}.bias"]) for part in parts])
        return ops.add(result, constant(biases[None]))

    def _product(self, hidden: ov.Node | ov.Output, weight: Weight) -> ov.Node:
        summed = with_sums(weight) if self._form == "u4" else None
        if isinstance(weight, DenseWeight) or summed is None:
            return ops.matmul(hidden, matrix(weight), False, True)
        added = summed.codes.shape[1] - weight.codes.shape[1]
        widened = _with_group_sums(hidden, weight.codes.shape[1] // weight.group_size, weight.group_size, added)
        return ops.matmul(widened, matrix(summed), False, True)

    def _norm(self, hidden: ov.Node | ov.Output, name: str) -> ov.Node:
        weight = self._weights[name]
        assert isinstance(weight, DenseWeight), name
        return _rms_norm(hidden, values(weight) + np.float32(self.config.norm_offset), self.config.rms_norm_eps)


def _with_group_sums(hidden: ov.Node | ov.Output, groups: int, size: int, added: int) -> ov.Node:
    """Returns [num_tokens, groups * size + added]: the input, the sum of each of its groups, and zeros.

    The sums are a product with zeros and ones, which is one node; reducing, padding and changing types would be four.
    """
    members = np.zeros((added, groups * size), dtype=np.float32)
    members[:groups] = np.repeat(np.eye(groups, dtype=np.float32), size, axis=1)
    return ops.concat([hidden, ops.matmul(hidden, constant(members), False, True)], 1)


def _rms_norm(hidden: ov.Node | ov.Output, weight: npt.NDArray[np.float32], eps: float) -> ov.Node:
    mean = ops.reduce_mean(ops.power(hidden, constant(np.float32(2))), constant(np.array([-1], dtype=np.int64)), True)
    root = ops.sqrt(ops.add(mean, constant(np.float32(eps))))
    return ops.multiply(constant(weight[None]), ops.multiply(hidden, ops.divide(constant(np.float32(1)), root)))


def _rotary(config: DecoderConfig, inputs: PagedInputs, *, windowed: bool) -> _Rotary:
    how = rotation(config, windowed=windowed)
    frequencies = np.concatenate([how.frequencies, how.frequencies]).reshape(1, 1, 1, -1)
    shape = constant(np.array([-1, 1, 1, 1], dtype=np.int64))
    angles = ops.multiply(ops.reshape(ops.convert(inputs.position_ids, "f32"), shape, False), constant(frequencies))
    cos, sin = ops.cos(angles), ops.sin(angles)
    if how.magnitude == 1.0:
        return _Rotary(cos, sin)
    return _Rotary(*(ops.multiply(x, constant(np.float32(how.magnitude))) for x in (cos, sin)))


def _rotated(heads: ov.Node, rotary: _Rotary, width: int) -> ov.Node:
    """Returns [num_tokens, heads, 1, head_dim] rotated by halves: x * cos + [-x2, x1] * sin."""
    first, second = _split(heads, 3, [width // 2, width // 2])
    turned = ops.concat([ops.multiply(second, constant(np.float32(-1))), first], -1)
    return ops.add(ops.multiply(heads, rotary.cos), ops.multiply(turned, rotary.sin))


def _split(node: ov.Node, axis: int, lengths: list[int]) -> list[ov.Output]:
    parts = ops.variadic_split(node, constant(np.int64(axis)), constant(np.array(lengths, dtype=np.int64)))
    return list(parts.outputs())


def _per_head(flat: ov.Output, heads: int, width: int) -> ov.Node:
    return ops.reshape(flat, constant(np.array([0, heads, 1, width], dtype=np.int64)), True)


def _flat(heads: ov.Node | ov.Output) -> ov.Node:
    return ops.reshape(heads, constant(np.array([0, -1], dtype=np.int64)), True)


def _capped(logits: ov.Node, cap: float | None) -> ov.Node:
    if cap is None:
        return logits
    limit = constant(np.float32(cap))
    return ops.multiply(ops.tanh(ops.divide(logits, limit)), limit)
