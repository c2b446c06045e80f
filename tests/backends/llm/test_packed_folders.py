"""AWQ and GPTQ folders: codes packed here bit by bit come back as they were, and the model answers by them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.llm.engine.outputs import BlockId, RequestId, ScheduledRequest, SchedulerOutput
from backends.llm.loaders import DenseWeight, GroupedWeight, load_model
from backends.llm.models.weights import values
from compiler.errors import ModelRefused

transformers = pytest.importorskip("transformers")
import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

GROUP = 16
SIZES = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # of AWQ: the column of each nibble of a word, from the lowest


def _words(codes: np.ndarray, bits: int, order: tuple[int, ...]) -> torch.Tensor:
    """Packs along the last dim, code by code, as the formats are described."""
    per_word = 32 // bits
    packed = np.zeros((codes.shape[0], codes.shape[1] // per_word), dtype=np.uint64)
    for row in range(codes.shape[0]):
        for word in range(packed.shape[1]):
            for place in range(per_word):
                packed[row, word] |= np.uint64(int(codes[row, word * per_word + order[place]]) << (bits * place))
    return torch.from_numpy(packed.astype(np.uint32).view(np.int32).copy())


def _pack(matrix: str, shape: tuple[int, ...], config: dict[str, Any], groups: np.ndarray | None, seed: int) -> Any:
    """Returns the tensors of a matrix of random codes, and its values [out, in] by the formula."""
    random, bits, (rows, columns) = np.random.default_rng(seed), config["bits"], shape
    count = columns // GROUP
    codes = random.integers(0, 2**bits, (columns, rows))
    zeros = random.integers(1, 2**bits, (count, rows))
    scales = random.uniform(0.01, 0.02, (count, rows)).astype(np.float16)
    of = np.arange(columns) // GROUP if groups is None else groups[:columns] % count
    wanted = (scales[of].astype(np.float32) * (codes - zeros[of]).astype(np.float32)).T
    if config["quant_method"] == "awq":
        tensors = {"qweight": _words(codes, bits, ORDER), "qzeros": _words(zeros, bits, ORDER)}
    else:
        plain, minus = tuple(range(32 // bits)), config.get("checkpoint_format") != "gptq_v2"
        tensors = {
            "qweight": _words(codes.T, bits, plain).T.contiguous(),
            "qzeros": _words(zeros - minus, bits, plain),
            "g_idx": torch.from_numpy(of.astype(np.int32)),
        }
    tensors["scales"] = torch.from_numpy(scales)
    return {f"{matrix}.{part}": tensor for part, tensor in tensors.items()}, wanted


def _folder(path: Path, config: dict[str, Any], groups: np.ndarray | None = None) -> tuple[Path, Any]:
    """Writes a tiny Llama whose matrices but embedding and head are packed; returns transformers' model of it."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**SIZES)).eval()
    model.save_pretrained(path)
    state = load_file(path / "model.safetensors")
    exact = dict(state)
    for seed, name in enumerate(sorted(n for n in state if n.endswith("_proj.weight"))):
        shape = tuple(state.pop(name).shape)
        parts, wanted = _pack(name.removesuffix(".weight"), shape, config, groups, seed)
        state |= parts
        exact[name] = torch.from_numpy(wanted)
    save_file(state, path / "model.safetensors")
    _edit(path, quantization_config=config)
    model.load_state_dict(exact)
    return path, model


def _edit(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def _retouch(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> str:
    """Changes the tensors; returns the refusal."""
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors")
    with pytest.raises(ModelRefused) as caught:
        list(load_model(folder).weights.values())
    return str(caught.value)


FORMATS = {
    "awq": AWQ,
    "gptq": GPTQ,
    "gptq 8 bits": {**GPTQ, "bits": 8},
    "gptq 2 bits": {**GPTQ, "bits": 2},
    "gptq v2": {**GPTQ, "checkpoint_format": "gptq_v2"},
}


@pytest.mark.parametrize("name", FORMATS)
def test_codes_come_back_as_they_were_packed(tmp_path: Path, name: str) -> None:
    config = FORMATS[name]
    folder, theirs = _folder(tmp_path / "m", config)
    loaded = load_model(folder)
    state = theirs.state_dict()
    assert set(loaded.weights) == set(state)
    for key, weight in loaded.weights.items():
        if key.endswith("_proj.weight"):
            assert isinstance(weight, GroupedWeight)
            assert (weight.bits, weight.group_size) == (config["bits"], GROUP)
        np.testing.assert_allclose(values(weight), state[key].numpy(), rtol=0, atol=1e-6, err_msg=key)
    assert loaded.quantization == f"{config['quant_method'].upper()} {config['bits']} bits"


def test_groups_in_another_order_become_values(tmp_path: Path) -> None:
    groups = np.random.default_rng(0).permutation(np.arange(48) // GROUP)
    folder, theirs = _folder(tmp_path / "m", {**GPTQ, "desc_act": True}, groups)
    for key, weight in load_model(folder).weights.items():
        assert isinstance(weight, DenseWeight)
        np.testing.assert_array_equal(values(weight), theirs.state_dict()[key].numpy(), err_msg=key)


@pytest.mark.parametrize(("config", "form"), [(AWQ, "exact"), (GPTQ, "exact"), (GPTQ, "u4")])
def test_the_runner_computes_with_the_packed_values(tmp_path: Path, config: dict[str, Any], form: str) -> None:
    from backends.llm.runners.cpu_options import CpuOptions
    from backends.llm.runners.openvino import OpenVinoRunner

    folder, theirs = _folder(tmp_path / "m", config)
    options = CpuOptions(exact=True) if form == "exact" else CpuOptions(weights="u4")
    runner = OpenVinoRunner(load_model(folder), options)
    ids = np.random.default_rng(3).integers(0, 96, 30).tolist()
    step = ScheduledRequest(RequestId("a"), ids, 0, [BlockId(0)], len(ids))
    got = runner.execute(SchedulerOutput((step,))).logits
    with torch.inference_mode():
        wanted = theirs(torch.tensor([ids])).logits[0].numpy()
    # Whole zero points stay whole: in "u4" only activations are rounded, and sums are bf16's.
    np.testing.assert_allclose(got, wanted, atol=1e-4 if form == "exact" else 0.05 * np.abs(wanted).max())
    runner.close()


def test_a_bias_of_zeros_is_left_out_and_another_refused(tmp_path: Path) -> None:
    folder, _ = _folder(tmp_path / "m", GPTQ)
    name = "model.layers.0.self_attn.k_proj.bias"
    state = load_file(folder / "model.safetensors")
    save_file({**state, name: torch.zeros(16, dtype=torch.float16)}, folder / "model.safetensors")
    assert name not in load_model(folder).weights
    message = _retouch(folder, lambda s: s.update({name: torch.ones(16, dtype=torch.float16)}))
    assert f"not in the model: {name}" in message


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s.pop(f"{Q}.qzeros"), f"'{Q}.weight' is packed, and lacks: qzeros"),
        (lambda s: s.update({f"{Q}.scales": s[f"{Q}.scales"][:, 1:].clone()}), "has scales [2, 31]"),
        (lambda s: s.update({f"{Q}.qzeros": s[f"{Q}.qzeros"][:1].clone()}), "has [2, 32] and [2, 4]"),
        (lambda s: s.update({f"{Q}.qweight": s[f"{Q}.qweight"].float()}), "has the type F32; allowed: I32"),
        (lambda s: s.update({f"{Q}.g_idx": s[f"{Q}.g_idx"][:-1].clone()}), "has g_idx [31]; wanted: [32]"),
        (lambda s: s.update({f"{Q}.g_idx": s[f"{Q}.g_idx"] + 1}), "g_idx' names group 2; there are 2, from 0"),
        (lambda s: s.update({f"{Q}.qweight": torch.zeros(4, dtype=torch.int32)}), "qweight [4]"),
        (lambda s: s.update({f"{Q}.qweight": s[f"{Q}.qweight"][:2].clone()}), "'model.layers.0.self_attn.q_proj"),
    ],
)
def test_parts_that_do_not_fit_are_refused_by_name(tmp_path: Path, change: Any, words: str) -> None:
    folder, _ = _folder(tmp_path / "m", GPTQ)
    assert words in _retouch(folder, change)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes'; allowed: awq, gptq"),
        ({"quant_method": ["x"]}, "quant_method \"['x']\""),
        ("int8", "quant_method 'None'"),
        ({**GPTQ, "bits": 3}, "has 3 bits; gptq is read with: (2, 4, 8)"),
        ({**AWQ, "bits": 8}, "has 8 bits; awq is read with: (4,)"),
        ({**AWQ, "version": "gemv"}, "has the version 'gemv'; allowed: gemm"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "has the checkpoint_format 'marlin'; allowed: gptq, gptq_v2"),
    ],
)
def test_other_ways_to_quantise_are_refused(tmp_path: Path, config: Any, words: str) -> None:
    folder, _ = _folder(tmp_path / "m", GPTQ)
    _edit(folder, quantization_config=config)
    with pytest.raises(ModelRefused) as caught:
        load_model(folder)
    assert words in str(caught.value)
