"""How much memory weights and KV cache take, and how many requests fit. Pure arithmetic over DecoderConfig."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from backends.llm.loaders.shapes import expected_shapes
from backends.llm.models.config import DecoderConfig

# Bytes of one number in the KV cache.
KV_DTYPES = {"f32": 4, "f16": 2, "bf16": 2, "u8": 1}
# In u8 a scale and a zero point, each a float32, go with each token of a head's values and with each column of a block
# of its keys: that is how OpenVINO's paged attention keeps them.
_U8_SCALE_BYTES = 8


def num_parameters(config: DecoderConfig) -> int:
    """Returns the numbers in all weights; a matrix that is shared counts once."""
    return sum(math.prod(shape) for shape in expected_shapes(config).values())


def kv_bytes_per_block(config: DecoderConfig, dtype: str, block_size: int) -> int:
    """Returns the bytes of one block's keys and values in all layers: 2 x layers x kv_heads x head_dim x bytes a token.

    Args:
        dtype: a key of KV_DTYPES; with "u8" the scales are counted too.
    """
    numbers = 2 * block_size * config.head_dim * KV_DTYPES[dtype]
    scales = _U8_SCALE_BYTES * (block_size + config.head_dim) if dtype == "u8" else 0
    return config.num_hidden_layers * config.num_key_value_heads * (numbers + scales)


def kv_bytes_per_token(config: DecoderConfig, dtype: str, block_size: int) -> int:
    """Returns a token's share of a block, rounded up."""
    return -(-kv_bytes_per_block(config, dtype, block_size) // block_size)


def kv_bytes_needed(config: DecoderConfig, num_tokens: int, dtype: str, block_size: int) -> int:
    """Returns the bytes that the model reads at that length: a windowed layer reads no more than its window."""
    windowed = sum(config.windowed_layers)
    seen = min(num_tokens, config.sliding_window) if config.sliding_window else num_tokens
    tokens_of_layers = (config.num_hidden_layers - windowed) * num_tokens + windowed * seen
    return -(
        -kv_bytes_per_block(config, dtype, block_size) * tokens_of_layers // (config.num_hidden_layers * block_size)
    )


def mean_waste(block_size: int, num_tokens: int) -> tuple[float, float]:
    """Returns the unfilled end of a request's last block: in tokens, on average over lengths, and as a share.

    The last block holds 1 .. block_size tokens, all equally likely: (block_size - 1) / 2 places are free. The share is
    of the places that a request of `num_tokens` takes.
    """
    tokens = (block_size - 1) / 2
    return tokens, tokens / (num_tokens + tokens)


@dataclass(frozen=True)
class Fit:
    """Requests of one length, prompt and answer together.

    Attributes:
        num_blocks: of one request.
        kv_bytes: of one request, whole blocks.
        kv_bytes_needed: what the model reads of them.
        requests: that fit at the same time.
    """

    length: int
    num_blocks: int
    kv_bytes: int
    kv_bytes_needed: int
    requests: int


@dataclass(frozen=True)
class KvPlan:
    """What fits into a memory.

    Attributes:
        usable_bytes: of the memory, after what is to stay free.
        weight_bytes: of the weights.
        num_blocks: of the KV cache, in what the weights leave; 0 where they leave nothing.
    """

    config: DecoderConfig
    parameters: int
    usable_bytes: int
    weight_bytes: int
    block_size: int
    dtype: str
    num_blocks: int
    fits: tuple[Fit, ...]

    @property
    def kv_bytes_per_token(self) -> int:
        return kv_bytes_per_token(self.config, self.dtype, self.block_size)

    @property
    def kv_bytes_per_block(self) -> int:
        return kv_bytes_per_block(self.config, self.dtype, self.block_size)


def plan_kv_cache(
    config: DecoderConfig,
    *,
    usable_bytes: int,
    weight_bytes: int,
    block_size: int,
    dtype: str,
    lengths: Sequence[int],
) -> KvPlan:
    """Returns how many blocks the weights leave room for, and how many requests of each length fit into them.

    Every layer keeps every token of a running request, windowed layers too: that is how this engine's cache works.
    """
    block_bytes = kv_bytes_per_block(config, dtype, block_size)
    num_blocks = max(0, usable_bytes - weight_bytes) // block_bytes
    fits = []
    for length in lengths:
        blocks = -(-length // block_size)
        needed = kv_bytes_needed(config, length, dtype, block_size)
        fits.append(Fit(length, blocks, blocks * block_bytes, needed, num_blocks // blocks))
    return KvPlan(
        config=config,
        parameters=num_parameters(config),
        usable_bytes=usable_bytes,
        weight_bytes=weight_bytes,
        block_size=block_size,
        dtype=dtype,
        num_blocks=num_blocks,
        fits=tuple(fits),
    )
