"""What a GPU's memory leaves for the KV cache, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backends.llm.capacity import num_parameters
from backends.llm.models.config import DecoderConfig
from backends.llm.runners.gpu_memory import kv_cache_bytes_left, step_bytes
from compiler.errors import UsageError

GIB = 1 << 30
CONFIG = DecoderConfig(
    architecture="llama",
    vocab_size=1000,
    hidden_size=64,
    intermediate_size=100,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=256,
    rms_norm_eps=1e-5,
    rope_theta=1e4,
    query_scale=0.25,
)
MEMORY = {"total": 16 * GIB, "utilization": 0.75, "step": GIB // 2, "workspaces": GIB // 4}


def test_what_is_left_is_the_share_less_what_others_have_and_weights_and_a_step() -> None:
    weights = num_parameters(CONFIG) * 2
    # Alone 12 of 16 GiB may be taken; where others have 6 already, 6.
    assert kv_cache_bytes_left(CONFIG, 2, free=16 * GIB, **MEMORY) == 12 * GIB - weights - GIB * 3 // 4
    assert kv_cache_bytes_left(CONFIG, 2, free=10 * GIB, **MEMORY) == 6 * GIB - weights - GIB * 3 // 4


def test_nothing_left_is_told_with_the_numbers() -> None:
    with pytest.raises(UsageError) as caught:
        kv_cache_bytes_left(CONFIG, 2, free=4 * GIB + GIB // 2, **MEMORY)
    assert "gpu_memory_utilization is 0.75: of the GPU's 16.0 GiB 4.5 GiB are free and 512.0 MiB may be" in str(caught)
    assert "nothing is left for the KV cache" in str(caught)


def test_a_step_grows_with_its_tokens_and_the_logits_of_its_rows() -> None:
    # Of a token: 64 x (2 x 2 + 8) bytes and 4 x 100 x 2; of a row, doubled: 1000 x (2 + 12).
    assert step_bytes(CONFIG, 2, max_tokens=1000, max_rows=0) == int(1.1 * 1000 * (64 * 12 + 800))
    assert step_bytes(CONFIG, 2, max_tokens=0, max_rows=8) == int(1.1 * 16 * 14_000)
    wide = replace(CONFIG, num_attention_heads=16)  # more in the heads than in the product
    assert step_bytes(wide, 2, max_tokens=1000, max_rows=0) == int(1.1 * 1000 * (64 * 12 + 3 * 20 * 16 * 2))
