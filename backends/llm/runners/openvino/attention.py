"""OpenVINO's paged attention as a node, and the inputs that it shares with the rest of the graph."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import numpy as np
import openvino as ov
import openvino.opset15 as ops
from openvino.op import _PagedAttentionExtension

from backends.llm.models.config import DecoderConfig
from backends.llm.runners.openvino.constants import constant
from compiler.errors import EnvironmentLacks


@dataclass(frozen=True)
class PagedInputs:
    """The graph's inputs; the fields bear the names of StepInputs."""

    input_ids: ov.Output
    position_ids: ov.Output
    past_lens: ov.Output
    subsequence_begins: ov.Output
    block_indices: ov.Output
    block_indices_begins: ov.Output
    max_context_len: ov.Output
    logits_indices: ov.Output
    caches: list[ov.Node] = field(default_factory=list)

    @classmethod
    def create(cls) -> PagedInputs:
        made = {
            f.name: _parameter(f.name, [] if f.name == "max_context_len" else [-1], ov.Type.i32).output(0)
            for f in fields(cls)
            if f.name != "caches"
        }
        return cls(**made)

    def cache(self, name: str) -> ov.Node:
        """Adds a cache tensor; the plugin sets its shape and element type when it compiles the graph."""
        self.caches.append(_parameter(name, [-1, -1, -1, -1], ov.Type.dynamic))
        return self.caches[-1]

    def parameters(self) -> list[ov.Node]:
        return [getattr(self, f.name).get_node() for f in fields(self) if f.name != "caches"] + self.caches


def paged_attention(
    inputs: PagedInputs,
    config: DecoderConfig,
    layer: int,
    query: ov.Node,
    key: ov.Node,
    value: ov.Output,
    window: int,
) -> ov.Output:
    """Writes a layer's keys and values into its blocks and returns what the tokens attend to.

    Args:
        query: [num_tokens, num_attention_heads * head_dim].
        key, value: [num_tokens, num_key_value_heads * head_dim].
        window: tokens that a token sees, itself included; 0 is all.

    Raises:
        EnvironmentLacks: this OpenVINO has another paged attention than the one that we know.
    """
    caches = inputs.cache(f"key_cache.{layer}"), inputs.cache(f"value_cache.{layer}")
    arguments = [
        query, key, value, *caches,
        inputs.past_lens, inputs.subsequence_begins, inputs.block_indices, inputs.block_indices_begins,
        constant(np.float32(config.query_scale)),
        constant(np.int32(window)),
        _none(np.float32),  # slopes of ALiBi
        inputs.max_context_len,
        *_unused_features(),
    ]  # fmt: skip
    try:
        node = _PagedAttentionExtension([a if isinstance(a, ov.Output) else a.output(0) for a in arguments])
    except RuntimeError as e:
        raise EnvironmentLacks(
            f"OpenVINO {ov.__version__} has another paged attention than 2026.4, which this graph is made for: {e}",
            hint="pip install 'openvino==2026.4.1'",
        ) from None
    set_head_sizes(node, config)
    return node.output(0)


def set_head_sizes(node: ov.Node, config: DecoderConfig) -> None:
    """Tells the plugin what it cannot see from the shapes."""
    sizes = {"num_k_heads": config.num_key_value_heads, "k_head_size": config.head_dim}
    sizes |= {"num_v_heads": config.num_key_value_heads, "v_head_size": config.head_dim}
    for name, size in sizes.items():
        node.get_rt_info()[name] = size


def _unused_features() -> list[ov.Node]:
    """Inputs 13 to 27: attention scores, rotation of the cache, sparse attention, eviction, draft trees: off."""
    off = constant(np.int32(0))
    return [
        _none(np.int32),
        *(_none(np.int32), _none(np.int32), _none(np.float32)),
        *(_none(np.float32), off, off),
        constant(np.zeros((0, 0, 0, 0), dtype=np.float32)),
        off,
        *(_none(np.int32), _none(np.int32), _none(np.int32), _none(np.int32)),
        *(_none(np.uint8), _none(np.int32)),
    ]


def _none(kind: type[np.generic]) -> ov.Node:
    return constant(np.zeros(0, dtype=kind))


def _parameter(name: str, shape: list[int], kind: ov.Type) -> ov.Node:
    node = ops.parameter(shape, np.float32, name=name)
    node.set_element_type(kind)
    node.validate_and_infer_types()
    node.output(0).get_tensor().set_names({name})
    return node
