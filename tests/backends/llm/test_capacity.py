"""The arithmetic of memory: figures worked out by hand, and the KV cache of transformers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from backends.llm.capacity import (
    kv_bytes_needed,
    kv_bytes_per_block,
    kv_bytes_per_token,
    mean_waste,
    num_parameters,
    plan_kv_cache,
)
from backends.llm.loaders.huggingface_config import config_from_huggingface
from backends.llm.models.config import DecoderConfig

SMALL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
}
LLAMA_70B: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}


def _config(values: dict[str, Any], **changes: Any) -> DecoderConfig:
    return config_from_huggingface({**values, **changes}, "m")


def test_g30_kv_bytes_count_the_heads_of_keys_and_the_explicit_head_dim() -> None:
    config = _config(SMALL)
    assert kv_bytes_per_token(config, "f16", 16) == 768  # 1536 with all heads, 384 with hidden / heads
    plan = plan_kv_cache(config, usable_bytes=0, weight_bytes=0, block_size=16, dtype="f16", lengths=[])
    assert (plan.kv_bytes_per_token, plan.kv_bytes_per_block) == (768, 12288)
    assert kv_bytes_per_token(config, "f32", 16) == 1536


def test_g31_windowed_layers_count_up_to_the_window() -> None:
    config = replace(
        _config(SMALL, num_hidden_layers=36, num_attention_heads=8, num_key_value_heads=8, head_dim=64),
        sliding_window=1024,
        windowed_layers=(True, False) * 18,
    )
    assert kv_bytes_per_token(config, "f16", 16) == 73728
    assert kv_bytes_needed(config, 1, "f16", 16) == 73728
    assert kv_bytes_needed(config, 1024, "f16", 16) == 1024 * 73728
    assert kv_bytes_needed(config, 1025, "f16", 16) - kv_bytes_needed(config, 1024, "f16", 16) == 73728 // 2
    assert kv_bytes_needed(config, 4096, "f16", 16) == 73728 // 2 * (4096 + 1024)


def test_llama_3_70b_at_4096_tokens_and_16_requests() -> None:
    config = _config(LLAMA_70B)
    assert num_parameters(config) == 70_553_706_496
    assert 16 * kv_bytes_needed(config, 4096, "f16", 16) == 20 << 30
    as_many_heads = _config(LLAMA_70B, num_key_value_heads=64)
    assert 16 * kv_bytes_needed(as_many_heads, 4096, "f16", 16) == 160 << 30


def test_parameters_are_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    kinds = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "gemma3_text": "Gemma3Text", "mistral": "Mistral"}
    for kind, name in kinds.items():
        for tied in (True, False):
            sizes = {**SMALL, "model_type": kind, "tie_word_embeddings": tied, "head_dim": 16}
            config = getattr(transformers, f"{name}Config")(**{k: v for k, v in sizes.items() if k != "model_type"})
            with torch.device("meta"):
                model = transformers.AutoModelForCausalLM.from_config(config)
            assert num_parameters(_config(sizes, sliding_window=64)) == model.num_parameters(), kind


def test_a_plan_by_hand() -> None:
    """768 bytes a token, 12288 a block; 1,000,000 bytes less 385,600 of weights are 50 blocks."""
    plan = plan_kv_cache(
        _config(SMALL),
        usable_bytes=1_000_000,
        weight_bytes=385_600,
        block_size=16,
        dtype="f16",
        lengths=[1, 16, 17, 800],
    )
    assert plan.num_blocks == 50
    assert [(f.num_blocks, f.requests, f.kv_bytes) for f in plan.fits] == [
        *((1, 50, 12288), (1, 50, 12288), (2, 25, 24576), (50, 1, 614400)),
    ]
    assert plan.fits[2].kv_bytes_needed == 17 * 768


def test_weights_that_leave_nothing() -> None:
    plan = plan_kv_cache(_config(SMALL), usable_bytes=100, weight_bytes=200, block_size=16, dtype="f16", lengths=[10])
    assert (plan.num_blocks, plan.fits[0].requests) == (0, 0)


@pytest.mark.parametrize("block_size", [1, 8, 16, 32])
def test_waste_is_the_mean_over_all_lengths(block_size: int) -> None:
    lengths = range(1, 64 * block_size + 1)
    counted = sum(-n % block_size for n in lengths) / len(lengths)
    assert mean_waste(block_size, 512)[0] == counted == (block_size - 1) / 2
    assert mean_waste(block_size, 512)[1] == counted / (512 + counted)


def test_waste_stays_under_4_percent_at_a_mean_of_512_tokens() -> None:
    assert mean_waste(32, 512)[1] < 0.04


def test_bytes_of_a_u8_cache_are_those_that_the_runner_has():
    """OpenVINO's own tensors, of a model with two heads of 32: [2, 40, 32] and [2, 32, 40] bytes a layer and block."""
    pytest.importorskip("openvino")
    from backends.llm.runners.cpu_options import CpuOptions
    from backends.llm.runners.openvino import OpenVinoRunner
    from tests.backends.llm.runners.tiny_models import build

    _, model = build("llama")
    for precision, dtype in (("u8", "u8"), ("auto", "f32")):
        options = CpuOptions(kv_cache_bytes=1 << 20, num_threads=1, kv_cache_precision=precision, exact=dtype == "f32")
        runner = OpenVinoRunner(model, options)
        assert runner.block_bytes == kv_bytes_per_block(model.config, dtype, runner.block_size)
        runner.close()
    assert kv_bytes_per_block(model.config, "u8", 32) == 3 * 2 * (40 * 32 + 32 * 40)
    assert kv_bytes_per_token(model.config, "u8", 32) == 480
