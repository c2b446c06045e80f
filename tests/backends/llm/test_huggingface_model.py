"""Hugging Face folders as models, written by transformers itself."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.llm.loaders import DenseWeight, load_model
from backends.llm.loaders.base import LoadedModel
from backends.llm.loaders.huggingface_config import config_from_huggingface
from backends.llm.models.config import RopeScaling
from compiler.errors import ModelRefused
from compiler.sources.huggingface_folder import read_config

transformers = pytest.importorskip("transformers")
import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
CONFIGS: dict[str, Callable[..., Any]] = {
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
    "qwen2": lambda **sizes: transformers.Qwen2Config(**{**sizes, "head_dim": 8}),
    "qwen3": transformers.Qwen3Config,
    "gemma3": lambda **sizes: transformers.Gemma3TextConfig(**sizes, query_pre_attn_scalar=24, sliding_window=16),
}


def _model(kind: str, **options: Any) -> Any:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(CONFIGS[kind](**SIZES, **options))


def _saved(tmp_path: Path, kind: str = "llama", **options: Any) -> Path:
    model = _model(kind, **options)
    model.save_pretrained(tmp_path / kind)
    return tmp_path / kind


def _edit(folder: Path, **changes: Any) -> Path:
    """Changes config.json; None removes a key."""
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return folder


def _refusal(folder: Path) -> str:
    with pytest.raises(ModelRefused) as caught:
        load_model(folder)
    return str(caught.value)


def _check_equal(loaded: LoadedModel, state: dict[str, Any]) -> None:
    assert set(loaded.weights) == set(state)
    for name, weight in loaded.weights.items():
        assert isinstance(weight, DenseWeight)
        assert weight.array.dtype.name == str(state[name].dtype).removeprefix("torch.")
        assert np.array_equal(weight.array.astype(np.float32), state[name].float().numpy()), name


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("tied", [True, False])
def test_weights_and_config_are_those_that_transformers_saved(tmp_path: Path, kind: str, tied: bool) -> None:
    model = _model(kind, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path / kind)
    loaded = load_model(tmp_path / kind)
    state = model.state_dict()
    if tied:
        del state["lm_head.weight"]
    _check_equal(loaded, state)
    c, theirs = loaded.config, model.config
    assert c.architecture == kind and c.tie_word_embeddings == tied and loaded.quantization == "F32"
    head_dim = 8 if kind == "qwen2" else 16
    assert (c.vocab_size, c.hidden_size, c.intermediate_size, c.num_hidden_layers) == (96, 32, 48, 3)
    assert (c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.max_position_embeddings) == (4, 2, head_dim, 64)
    attention = model.model.layers[0].self_attn
    assert c.query_scale == attention.scaling and c.rms_norm_eps == theirs.rms_norm_eps
    assert (c.attention_bias, c.qk_norm) == (attention.q_proj.bias is not None, hasattr(attention, "q_norm"))
    if kind == "gemma3":
        assert (c.rope_theta, c.local_rope_theta, c.sliding_window) == (1e6, 1e4, 16)
        assert c.windowed_layers == tuple(t == "sliding_attention" for t in theirs.layer_types) == (True,) * 3
        assert c.embedding_scale == 32**0.5 and c.norm_offset == 1.0 and c.hidden_act == "gelu_tanh"
    else:
        assert (c.rope_theta, c.local_rope_theta) == (10000.0, None)
        assert (c.sliding_window, c.windowed_layers) == ((4096, (True,) * 3) if kind == "mistral" else (None, ()))
    hashes = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in (tmp_path / kind).iterdir()}
    assert dict(loaded.source) == {n: h for n, h in hashes.items() if n != "generation_config.json"}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_in_shards(tmp_path: Path, dtype: torch.dtype) -> None:
    model = _model("qwen3").to(dtype)
    model.save_pretrained(tmp_path / "m", max_shard_size="20KB")
    assert len(list((tmp_path / "m").glob("*.safetensors"))) > 2
    loaded = load_model(tmp_path / "m")
    _check_equal(loaded, model.state_dict())
    assert loaded.quantization == ("BF16" if dtype == torch.bfloat16 else "F16")


def test_j08_an_index_that_lacks_a_tensor_and_a_single_file_without_one(tmp_path: Path) -> None:
    """What the files hold counts."""
    model = _model("llama")
    model.save_pretrained(tmp_path / "m", max_shard_size="20KB")
    index = tmp_path / "m" / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    del content["weight_map"]["model.layers.1.mlp.up_proj.weight"]
    index.write_text(json.dumps(content))
    _check_equal(load_model(tmp_path / "m"), model.state_dict())
    model.save_pretrained(tmp_path / "one")
    assert not (tmp_path / "one" / "model.safetensors.index.json").exists()
    _check_equal(load_model(tmp_path / "one"), model.state_dict())


def test_an_index_that_puts_a_tensor_elsewhere_is_refused(tmp_path: Path) -> None:
    _model("llama").save_pretrained(tmp_path / "m", max_shard_size="20KB")
    index = tmp_path / "m" / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    name = "model.norm.weight"
    shards = sorted(set(content["weight_map"].values()))
    content["weight_map"][name] = next(s for s in shards if s != content["weight_map"][name])
    index.write_text(json.dumps(content))
    assert f"tensor '{name}' is not in {content['weight_map'][name]}" in _refusal(tmp_path / "m")


def test_j07_an_absent_head_is_shared_or_refused_and_never_random(tmp_path: Path) -> None:
    folder = _saved(tmp_path, tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    assert load_model(folder).config.tie_word_embeddings
    assert "missing: lm_head.weight" in _refusal(_edit(folder, tie_word_embeddings=False))


def test_a_tied_model_with_a_head_of_its_own(tmp_path: Path) -> None:
    folder = _saved(tmp_path, tie_word_embeddings=True)
    state = load_file(folder / "model.safetensors")
    state["lm_head.weight"] = state["model.embed_tokens.weight"].clone()
    save_file(state, folder / "model.safetensors")
    assert "lm_head.weight" not in load_model(folder).weights
    state["lm_head.weight"][3, 4] += 1
    save_file(state, folder / "model.safetensors")
    assert "says tie_word_embeddings, but 'lm_head.weight' is not 'model.embed_tokens.weight'" in _refusal(folder)


def test_j04_missing_extra_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    folder = _saved(tmp_path)
    state = load_file(folder / "model.safetensors")
    moved = {**state, "model.layers.0.mlp.extra.weight": torch.zeros(2)}
    del moved["model.layers.2.mlp.up_proj.weight"]
    save_file(moved, folder / "model.safetensors")
    message = _refusal(folder)
    assert "missing: model.layers.2.mlp.up_proj.weight" in message
    assert "not in the model: model.layers.0.mlp.extra.weight" in message
    save_file({**state, "model.norm.weight": torch.zeros(33)}, folder / "model.safetensors")
    assert "'model.norm.weight' has the shape [33]; by the config: [32]" in _refusal(folder)


def test_a_quantization_config_of_null_is_none(tmp_path: Path) -> None:
    folder = _saved(tmp_path)
    plain = load_model(folder)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": None}))
    assert load_model(folder).quantization == plain.quantization
    assert read_config(folder, "model")["model_type"] == "llama"


def test_tables_of_old_checkpoints_are_left_out(tmp_path: Path) -> None:
    folder = _saved(tmp_path)
    state = load_file(folder / "model.safetensors")
    save_file({**state, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}, folder / "model.safetensors")
    assert set(load_model(folder).weights) == set(state)


def test_other_types_of_numbers_are_refused_by_tensor(tmp_path: Path) -> None:
    folder = _saved(tmp_path)
    state = load_file(folder / "model.safetensors")
    save_file({**state, "model.norm.weight": torch.zeros(32).to(torch.float8_e4m3fn)}, folder / "model.safetensors")
    with pytest.raises(ModelRefused, match=r"tensor 'model.norm.weight' has the type F8_E4M3; allowed: BF16, F16, F32"):
        load_model(folder).weights["model.norm.weight"]


def test_quantised_folders_pickles_and_code_are_refused_by_name(tmp_path: Path) -> None:
    folder = _saved(tmp_path)
    quantised = _refusal(_edit(folder, quantization_config={"quant_method": "bitsandbytes", "bits": 4}))
    assert "'quantization_config' has the quant_method 'bitsandbytes'; allowed: awq, gptq" in quantised
    _edit(folder, quantization_config=None, auto_map={"AutoModel": "code.Model"})
    assert "auto_map" in _refusal(folder)
    _edit(folder, auto_map=None)
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert "pickled weights only (pytorch_model.bin)" in _refusal(folder)


def test_links_out_of_the_folder_are_refused(tmp_path: Path) -> None:
    folder = _saved(tmp_path)
    (folder / "model.safetensors").rename(tmp_path / "elsewhere.safetensors")
    (folder / "model.safetensors").symlink_to(tmp_path / "elsewhere.safetensors")
    assert "is a symbolic link" in _refusal(folder)


def test_a_file_that_shrinks_after_it_was_opened(tmp_path: Path) -> None:
    folder = _saved(tmp_path)
    loaded = load_model(folder)
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(5000)
    with pytest.raises(ModelRefused, match="cut off: the file changed while it was read"):
        list(loaded.weights.values())


def test_the_language_model_of_a_gemma_that_sees_images(tmp_path: Path) -> None:
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
    }
    config = transformers.Gemma3Config(
        text_config={**SIZES, "sliding_window": 16}, vision_config={**vision, "patch_size": 14}, mm_tokens_per_image=1
    )
    model = transformers.Gemma3ForConditionalGeneration(config)
    model.save_pretrained(tmp_path / "m")
    names = list(load_file(tmp_path / "m" / "model.safetensors"))
    assert any("vision_tower" in n for n in names) and any("language_model" in n for n in names)
    loaded = load_model(tmp_path / "m")
    state = {f"model.{k}": v for k, v in model.model.language_model.state_dict().items()}
    _check_equal(loaded, state)
    alone = config_from_huggingface(json.loads((tmp_path / "m" / "config.json").read_text())["text_config"], "m")
    assert loaded.config == alone and loaded.config.architecture == "gemma3"


def test_defaults_of_a_gemma_that_sees_images() -> None:
    """As the 4B's config.json has it: little, the rest is its class's defaults."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    c = config_from_huggingface({"model_type": "gemma3", "text_config": {**text, "model_type": "gemma3_text"}}, "m")
    theirs = transformers.Gemma3TextConfig(**text)
    assert (c.vocab_size, c.num_attention_heads, c.num_key_value_heads) == (
        *(theirs.vocab_size, theirs.num_attention_heads, theirs.num_key_value_heads),
    )
    assert (c.head_dim, c.max_position_embeddings) == (theirs.head_dim, theirs.max_position_embeddings)
    assert c.windowed_layers == tuple(t == "sliding_attention" for t in theirs.layer_types) and c.tie_word_embeddings
    with pytest.raises(ModelRefused, match=r"m: 'text_config': 'hidden_size' is missing"):
        config_from_huggingface({"model_type": "gemma3"}, "m")


BASE = {**SIZES, "model_type": "llama"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gpt2"}, "'model_type' is 'gpt2'; wanted: gemma3, gemma3_text, llama, mistral, qwen2, qwen3"),
        ({"model_type": None}, "'model_type' is missing"),
        ({"hidden_size": "32"}, "'hidden_size' is '32'; wanted: an integer from 1 to 2147483648"),
        ({"num_hidden_layers": 1 << 40}, "'num_hidden_layers' is '1099511627776'"),
        ({"num_hidden_layers": True}, "'num_hidden_layers' is 'True'"),
        ({"num_key_value_heads": 3}, "'num_key_value_heads' is '3'; wanted: a divisor of the 4 heads"),
        ({"head_dim": 7}, "'head_dim' is '7'; wanted: an even number"),
        ({"head_dim": None, "hidden_size": 33}, "'head_dim' is missing; wanted: a width of a head"),
        ({"hidden_act": "gelu"}, "'hidden_act' is 'gelu'; wanted: silu"),
        ({"mlp_bias": True}, "'mlp_bias' is 'True'; wanted: False"),
        ({"attention_bias": True}, "'attention_bias' is 'True'; wanted: false"),
        ({"partial_rotary_factor": 0.5}, "'partial_rotary_factor' is '0.5'"),
        ({"rms_norm_eps": 0}, "'rms_norm_eps' is '0'; wanted: a finite number above 0"),
        ({"rope_theta": float("inf")}, "'rope_theta' is 'inf'"),
        (
            {"rope_scaling": {"type": "longrope", "factor": 2}},
            "'rope_type' is missing; wanted: default, dynamic, linear",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "mscale": 1.0}}, "'mscale' is '1.0'; wanted: nothing"),
        ({"rope_scaling": [1]}, "'rope_scaling' is '[1]'; wanted: an object"),
        ({"tie_word_embeddings": "yes"}, "'tie_word_embeddings' is 'yes'; wanted: true or false"),
        ({"model_type": "qwen3", "num_key_value_heads": None}, "'num_key_value_heads' is missing"),
        ({"model_type": "qwen3", "layer_types": ["full_attention"]}, "wanted: 3 of full_attention, sliding_attention"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "'use_bidirectional_attention' is 'True'"),
    ],
)
def test_configs_that_do_not_fit_are_refused(changes: dict[str, Any], words: str) -> None:
    values = {k: v for k, v in (BASE | changes).items() if v is not None}
    with pytest.raises(ModelRefused) as caught:
        config_from_huggingface(values, "m/config.json")
    assert str(caught.value).startswith("m/config.json: ") and words in str(caught.value)


def test_rope_scalings_of_old_and_new_configs() -> None:
    llama3 = {
        **{"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        "original_max_position_embeddings": 8192,
    }
    expected = RopeScaling("llama3", 32.0, 1.0, 4.0, 8192)
    for keys in (
        {"rope_theta": 500000.0, "rope_scaling": llama3},
        {"rope_parameters": {**llama3, "rope_theta": 500000.0}},
    ):
        c = config_from_huggingface({**BASE, **keys}, "m")
        assert (c.rope_theta, c.rope_scaling) == (500000.0, expected)
    linear = config_from_huggingface({**BASE, "rope_scaling": {"type": "linear", "factor": 4}}, "m").rope_scaling
    assert linear == RopeScaling("linear", 4.0)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert config_from_huggingface({**BASE, "rope_scaling": yarn}, "m").rope_scaling == RopeScaling(
        "yarn", 4.0, 1.0, 32.0, 32768
    )
    gemma = {**BASE, "model_type": "gemma3_text", "sliding_window": 512, "rope_local_base_freq": 5000.0}
    c = config_from_huggingface({**gemma, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}, "m")
    assert (c.rope_theta, c.local_rope_theta, c.rope_scaling) == (1e6, 5000.0, RopeScaling("linear", 8.0))


def test_windowed_layers() -> None:
    def windows(**keys: Any) -> Any:
        c = config_from_huggingface({**BASE, **keys}, "m")
        return c.sliding_window, c.windowed_layers

    assert windows(model_type="mistral", sliding_window=None) == (None, ())
    assert windows(model_type="mistral") == (4096, (True,) * 3)
    assert windows(model_type="qwen2", sliding_window=8, max_window_layers=1) == (None, ())
    qwen = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    assert windows(**qwen) == (8, (False, True, True))
    gemma = {"model_type": "gemma3_text", "sliding_window": 16}
    assert windows(**gemma, sliding_window_pattern=2) == (16, (True, False, True))
    types = ["full_attention", "sliding_attention", "full_attention"]
    assert windows(**gemma, layer_types=types) == (16, (False, True, False))
