"""A GGUF file as a model: names, order of rows, norms and configuration as transformers reads them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.llm.loaders import DenseWeight, GroupedWeight, load_model
from backends.llm.loaders.base import LoadedModel, Weight
from backends.llm.loaders.gguf_config import gguf_name
from backends.llm.loaders.shapes import expected_shapes
from backends.llm.models.config import RopeScaling
from compiler.errors import ModelRefused
from tests.backends.llm.gguf_files import GgufBytes, Tensor, tensor, tiny


def _values(weight: Weight) -> np.ndarray[Any, Any]:
    """Returns the float32 values of a weight."""
    if isinstance(weight, DenseWeight):
        return weight.array.astype(np.float32)
    scales, mins = (np.repeat(a, weight.group_size, axis=1) for a in (weight.scales, weight.mins))
    values: np.ndarray[Any, Any] = scales * weight.codes + mins
    return values


def _load(path: Path, file: GgufBytes) -> LoadedModel:
    return load_model(file.write(path))


def _refusal(path: Path, file: GgufBytes) -> str:
    with pytest.raises(ModelRefused) as caught:
        _load(path, file)
    return str(caught.value)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tiny.gguf"


def test_smollm2(smollm2: Path) -> None:
    model = load_model(smollm2)
    c = model.config
    assert (c.architecture, c.vocab_size, c.hidden_size, c.intermediate_size) == ("llama", 49152, 576, 1536)
    assert (c.num_hidden_layers, c.num_attention_heads, c.num_key_value_heads, c.head_dim) == (30, 9, 3, 64)
    assert (c.rope_theta, c.query_scale, c.max_position_embeddings) == (100000.0, 0.125, 8192)
    assert np.float32(c.rms_norm_eps) == np.float32(1e-5)
    assert c.tie_word_embeddings and not c.windowed_layers and c.rope_scaling is None and c.norm_offset == 0.0
    assert model.quantization == "Q4_1" and len(model.weights) == 272
    matrix = model.weights["model.layers.3.mlp.down_proj.weight"]
    assert isinstance(matrix, GroupedWeight)
    assert matrix.codes.shape == (576, 1536) and (matrix.bits, matrix.group_size) == (4, 32)
    assert dict(model.source) == {smollm2.name: hashlib.sha256(smollm2.read_bytes()).hexdigest()}


@pytest.mark.slow
def test_smollm2_has_the_weights_that_transformers_reads(smollm2: Path) -> None:
    transformers = pytest.importorskip("transformers")
    import torch
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    shapes = transformers.LlamaConfig(hidden_size=576, num_attention_heads=9, num_key_value_heads=3, vocab_size=49152)
    with torch.device("meta"):
        empty = transformers.LlamaForCausalLM(shapes)
    theirs = load_gguf_checkpoint(str(smollm2), return_tensors=True, model_to_load=empty)["tensors"]
    model = load_model(smollm2)
    assert set(model.weights) == set(theirs)
    for name, weight in model.weights.items():
        assert np.array_equal(_values(weight), theirs[name].numpy()), name


def test_gemma3_270m(gemma3: Path) -> None:
    model = load_model(gemma3)
    c = model.config
    assert (c.architecture, c.num_hidden_layers, c.hidden_size, c.head_dim, c.num_key_value_heads) == (
        *("gemma3", 18, 640, 256, 1),
    )
    assert (c.sliding_window, c.rope_theta, c.local_rope_theta, c.query_scale) == (512, 1e6, 1e4, 256**-0.5)
    assert c.windowed_layers == (True, True, True, True, True, False) * 3
    assert (c.hidden_act, c.qk_norm, c.post_norms, c.norm_offset) == ("gelu_tanh", True, True, 1.0)
    assert c.embedding_scale == 640**0.5 and c.logits_softcap is None and c.tie_word_embeddings
    assert isinstance(model.weights["model.embed_tokens.weight"], GroupedWeight)  # Q8_0
    assert isinstance(model.weights["model.layers.0.mlp.down_proj.weight"], DenseWeight)  # Q6_K


def test_gemma3_norms_are_what_is_added_to_one(path: Path) -> None:
    file = tiny("gemma3")
    stored = {t.name: np.frombuffer(t.data, "<f4") for t in file.tensors}
    model = _load(path, file)
    for ours, theirs in (
        ("model.norm", "output_norm"),
        ("model.layers.1.input_layernorm", "blk.1.attn_norm"),
        ("model.layers.1.post_attention_layernorm", "blk.1.post_attention_norm"),
        ("model.layers.1.pre_feedforward_layernorm", "blk.1.ffn_norm"),
        ("model.layers.1.post_feedforward_layernorm", "blk.1.post_ffw_norm"),
        ("model.layers.1.self_attn.q_norm", "blk.1.attn_q_norm"),
    ):
        weight = _values(model.weights[f"{ours}.weight"])
        assert np.allclose(weight + 1, stored[f"{theirs}.weight"], rtol=0, atol=1e-7) and weight.mean() < -0.5
    kernel = _values(model.weights["model.layers.1.self_attn.q_proj.weight"])
    assert np.array_equal(kernel.reshape(-1), stored["blk.1.attn_q.weight"])  # rows are in order outside a Llama


def test_llama_rows_of_q_and_k_are_put_back_in_halves(path: Path) -> None:
    """As convert_hf_to_gguf.py stores them: pairs of neighbours. Here head_dim is 16: row 1 of the file is row 8."""
    file = tiny()
    stored = {t.name: np.frombuffer(t.data, "<f4") for t in file.tensors}
    model = _load(path, file)
    for name, heads in (("q", 4), ("k", 2)):
        rows = stored[f"blk.0.attn_{name}.weight"].reshape(heads, 16, 64)
        ours = _values(model.weights[f"model.layers.0.self_attn.{name}_proj.weight"]).reshape(heads, 16, 64)
        for head in range(heads):
            for i in range(8):
                assert np.array_equal(ours[head, i], rows[head, 2 * i])
                assert np.array_equal(ours[head, i + 8], rows[head, 2 * i + 1])
    value = _values(model.weights["model.layers.0.self_attn.v_proj.weight"])
    assert np.array_equal(value.reshape(-1), stored["blk.0.attn_v.weight"])


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "gemma3"])
@pytest.mark.parametrize("head_dim", [16, 24])
def test_tiny_models_of_each_architecture(path: Path, arch: str, head_dim: int) -> None:
    model = _load(path, tiny(arch, head_dim=head_dim, tied=arch != "qwen3"))
    c = model.config
    assert (c.head_dim, c.qk_norm, c.attention_bias) == (head_dim, arch in ("qwen3", "gemma3"), arch == "qwen2")
    assert c.tie_word_embeddings == ("lm_head.weight" not in model.weights) == (arch != "qwen3")
    assert ("model.layers.0.self_attn.k_proj.bias" in model.weights) == (arch == "qwen2")
    assert _values(model.weights["model.layers.1.self_attn.q_proj.weight"]).shape == (4 * head_dim, 64)
    assert model.quantization == "F32"


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "gemma3"])
def test_names_are_those_that_the_package_gguf_gives(path: Path, arch: str) -> None:
    gguf = pytest.importorskip("gguf")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[arch.upper()], 2)
    config = _load(path, tiny(arch, tied=False)).config
    for name in expected_shapes(config):
        assert gguf_name(name, config) == names.get_name(name, try_suffixes=(".weight", ".bias")), name


def test_llama_with_biases(path: Path) -> None:
    """Their order is that of the rows."""
    file = tiny()
    for i in range(2):
        file.tensors.extend(
            tensor(f"blk.{i}.attn_{n}.bias", np.arange(size)) for n, size in (("q", 64), ("k", 32), ("v", 32))
        )
    bias = _values(_load(path, file).weights["model.layers.0.self_attn.k_proj.bias"])
    assert bias.tolist()[:16] == [0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15]


def test_j04_missing_and_extra_tensors_are_named(path: Path) -> None:
    file = (
        tiny().without_tensor("blk.1.ffn_up.weight").with_tensor("blk.0.ffn_down.weight", name="blk.0.ffn_dwon.weight")
    )
    message = _refusal(path, file)
    assert "missing: blk.0.ffn_down.weight, blk.1.ffn_up.weight" in message
    assert "not in the model: blk.0.ffn_dwon.weight" in message


def test_a_tensor_of_another_shape_is_refused(path: Path) -> None:
    message = _refusal(path, tiny().with_tensor("blk.1.ffn_up.weight", dims=(96, 64)))
    assert "tensor 'blk.1.ffn_up.weight' has the shape [64, 96]; by the config: [96, 64]" in message


def test_j10_the_declared_shape_counts_where_a_tensor_was_stored_in_another(path: Path) -> None:
    """Q4_0 blocks along stored rows of 192 values, where the model has rows of 96."""
    rng = np.random.default_rng(0)
    name = "blk.0.ffn_down.weight"
    data = rng.integers(0, 60, 64 * 96 // 32 * 18, dtype=np.uint8)
    changed = tiny().with_tensor(name, dims=(192, 32), data=data.tobytes(), type_id=2)
    assert "has the shape [32, 192]" in _refusal(path, changed)
    model = _load(path, changed.with_metadata(**{f"comfy__gguf__orig_shape__{name}": [64, 96]}))
    gguf = pytest.importorskip("gguf")
    from gguf.quants import dequantize

    expected = dequantize(data.reshape(32, -1), gguf.GGMLQuantizationType.Q4_0).reshape(64, 96)
    assert np.array_equal(_values(model.weights["model.layers.0.mlp.down_proj.weight"]), expected)
    wrong = changed.with_metadata(**{f"comfy__gguf__orig_shape__{name}": [64, 97]})
    assert "is [64, 97]; wanted: a shape of as many elements as the stored [32, 192]" in _refusal(path, wrong)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"general__architecture": "mamba"}, "'general.architecture' is 'mamba'; wanted: gemma3, llama, qwen2, qwen3"),
        ({"general__architecture": None}, "'general.architecture' is missing"),
        ({"split__count": 3}, "is one of 3 files of a model\n  hint: join them: llama-gguf-split"),
        ({"llama__expert_count": 8}, "mixtures of experts are not supported"),
        ({"llama__block_count": 1 << 30}, "'llama.block_count' is 1073741824; wanted: an integer from 1 to 1024"),
        ({"llama__block_count": 0}, "'llama.block_count' is 0"),
        ({"llama__block_count": "2"}, "'llama.block_count' is '2'"),
        ({"llama__attention__head_count": 0}, "'llama.attention.head_count' is 0"),
        ({"llama__attention__head_count_kv": 3}, "is 3; wanted: a divisor of the 4 heads"),
        ({"llama__attention__head_count_kv": [2, 2]}, "is an array of 2; wanted: an integer"),
        ({"llama__attention__key_length": 15}, "'llama.attention.key_length' is 15; wanted: an even number"),
        ({"llama__attention__value_length": 32}, "'llama.attention.value_length' is 32; wanted: 16"),
        ({"llama__rope__dimension_count": 8}, "'llama.rope.dimension_count' is 8; wanted: 16"),
        ({"llama__rope__freq_base": float("nan")}, "'llama.rope.freq_base' is nan"),
        ({"llama__rope__scaling__type": "longrope"}, "is 'longrope'; wanted: none, linear or yarn"),
        ({"llama__attention__layer_norm_rms_epsilon": None}, "'llama.attention.layer_norm_rms_epsilon' is missing"),
    ],
)
def test_metadata_that_does_not_fit_is_refused(path: Path, changes: dict[str, Any], words: str) -> None:
    assert words in _refusal(path, tiny().with_metadata(**changes))


def test_rope_scalings(path: Path) -> None:
    linear = {"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": 8.0}
    assert _load(path, tiny().with_metadata(**linear)).config.rope_scaling == RopeScaling("linear", 8.0)
    old = _load(path, tiny().with_metadata(llama__rope__scale_linear=4.0)).config
    assert old.rope_scaling == RopeScaling("linear", 4.0)
    yarn = {
        **{"llama__rope__scaling__type": "yarn", "llama__rope__scaling__factor": 4.0},
        "llama__rope__scaling__original_context_length": 32768,
    }
    scaling = _load(path, tiny().with_metadata(**yarn)).config.rope_scaling
    assert scaling is not None and scaling.original_max_position_embeddings == 32768
    assert (scaling.kind, scaling.factor, scaling.low_freq_factor, scaling.high_freq_factor) == ("yarn", 4.0, 1.0, 32.0)
    assert scaling.attention_factor == pytest.approx(1.1386294361)  # 0.1 ln 4 + 1


def test_the_divisors_of_llama_3_are_read_from_their_tensor(path: Path) -> None:
    divisors = [1.0, 1.0, 1.5, 2.0, 4.0, 8.0, 8.0, 8.0]
    file = tiny()
    file.tensors.append(tensor("rope_freqs.weight", np.array(divisors)))
    scaling = _load(path, file).config.rope_scaling
    assert scaling == RopeScaling("divisors", 1.0, divisors=tuple(divisors))
    assert "rope_freqs.weight" not in load_model(path).weights
    bad = np.array([*divisors[:7], 0.0])
    assert "wanted: F32 [8], all finite and above 0" in _refusal(
        path, file.with_tensor("rope_freqs.weight", data=bad.astype("<f4").tobytes())
    )
    short = file.without_tensor("rope_freqs.weight")
    short.tensors.append(Tensor("rope_freqs.weight", (4,), b"\0" * 16))
    assert "tensor 'rope_freqs.weight' is F32 [4]; wanted: F32 [8]" in _refusal(path, short)


def test_only_models_are_opened(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match=r"weights.bin does not exist"):
        load_model(tmp_path / "weights.bin")
    (tmp_path / "weights.bin").write_bytes(b"anything")
    with pytest.raises(ModelRefused, match="no model"):
        load_model(tmp_path / "weights.bin")
