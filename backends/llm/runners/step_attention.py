"""What the torch runner's decoder calls for attention: keys and values go to their slots, then tokens attend.

Two of the three ways: written out, one request after the other, which is the reference; and our kernel, which reads the
blocks in place. `flashinfer_attention.py` is the third.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from backends.llm.models.attention import plain_attention
from backends.llm.models.config import DecoderConfig
from backends.llm.models.decoder import Attend, is_windowed
from backends.llm.runners.step_inputs import StepInputs
from backends.llm.runners.tiles import Tiles


@dataclass(frozen=True)
class PagedCache:
    """Keys and values of all layers.

    Attributes:
        keys, values: [num_layers, num_blocks, block_size, kv_heads, head_dim].
    """

    keys: Tensor
    values: Tensor

    @property
    def block_size(self) -> int:
        return int(self.keys.shape[2])


class StepAttention(Protocol):
    """One way to attend."""

    def prepare(self, inputs: StepInputs) -> Attend:
        """Returns what the decoder calls in each layer of this step."""
        ...


@dataclass(frozen=True)
class Slots:
    """Where the keys and values of a step's tokens go.

    Attributes:
        blocks, offsets: [num_tokens] int64, the block of each token and its place in it.
    """

    blocks: Tensor
    offsets: Tensor

    @classmethod
    def of(cls, inputs: StepInputs, cache: PagedCache) -> Slots:
        """Finds the slots in the step's block tables."""
        counts = np.diff(inputs.subsequence_begins)
        request = np.repeat(np.arange(len(counts)), counts)
        place = inputs.block_indices_begins[request] + inputs.position_ids // cache.block_size
        arrays = (inputs.block_indices[place], inputs.position_ids % cache.block_size)
        return cls(*(torch.from_numpy(array).to(cache.keys.device).long() for array in arrays))

    def store(self, cache: PagedCache, layer: int, key: Tensor, value: Tensor) -> None:
        """Writes the keys and values of one layer, [num_tokens, kv_heads, head_dim] each."""
        cache.keys[layer][self.blocks, self.offsets] = key
        cache.values[layer][self.blocks, self.offsets] = value


def block_tables(inputs: StepInputs) -> list[npt.NDArray[np.int32]]:
    """Returns the block table of each request."""
    return np.split(inputs.block_indices, inputs.block_indices_begins[1:-1])


@dataclass(frozen=True)
class PlainAttention:
    """Gathers what each request sees and writes every score down."""

    config: DecoderConfig
    cache: PagedCache

    def prepare(self, inputs: StepInputs) -> Attend:
        """See StepAttention."""
        slots = Slots.of(inputs, self.cache)
        device = self.cache.keys.device
        tables = [torch.from_numpy(table).to(device).long() for table in block_tables(inputs)]
        begins, pasts = inputs.subsequence_begins.tolist(), inputs.past_lens.tolist()

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            slots.store(self.cache, layer, key, value)
            attended = []
            for i, (table, past) in enumerate(zip(tables, pasts, strict=True)):
                chunk = query[begins[i] : begins[i + 1]]
                caches = (self.cache.keys[layer], self.cache.values[layer])
                keys, values = (c[table].flatten(0, 1)[: past + len(chunk)] for c in caches)
                attended.append(plain_attention(self.config, layer, chunk, keys, values, past))
            return torch.cat(attended)

        return attend


@dataclass(frozen=True)
class KernelAttention:
    """Hands the block tables to our kernel."""

    config: DecoderConfig
    cache: PagedCache

    def prepare(self, inputs: StepInputs) -> Attend:
        """See StepAttention."""
        tables = block_tables(inputs)
        padded = np.zeros((len(tables), max(map(len, tables))), dtype=np.int32)
        for row, table in zip(padded, tables, strict=True):
            row[: len(table)] = table
        device = self.cache.keys.device
        return kernel_attend(
            self.config,
            self.cache,
            Slots.of(inputs, self.cache),
            torch.from_numpy(padded).to(device),
            torch.from_numpy(inputs.past_lens).to(device),
            Tiles.of(torch.from_numpy(inputs.subsequence_begins), heads_per_kv_head(self.config), device),
        )


def heads_per_kv_head(config: DecoderConfig) -> int:
    return config.num_attention_heads // config.num_key_value_heads


def kernel_attend(
    config: DecoderConfig, cache: PagedCache, slots: Slots, tables: Tensor, past_lens: Tensor, tiles: Tiles
) -> Attend:
    """Returns what the decoder calls, over tensors that are on the device; see `paged_attention` for theirs."""
    from backends.llm.runners.paged_attention import paged_attention

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        slots.store(cache, layer, key, value)
        return paged_attention(
            query.contiguous(),
            cache.keys[layer],
            cache.values[layer],
            tables,
            past_lens,
            tiles,
            scale=config.query_scale,
            softcap=config.attention_softcap,
            sliding_window=config.sliding_window if is_windowed(config, layer) else None,
        )

    return attend
