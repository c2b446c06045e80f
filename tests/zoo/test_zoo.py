"""Each model of the zoo is built and proved, or refused with words that say what to change."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from compiler.calling import flatten_outputs, nested_inputs
from compiler.cases import make_case
from compiler.errors import ModelkilnError
from compiler.manifest import BuildResult
from compiler.pipeline import compile_model
from compiler.repository import Repository
from compiler.spec import ModelSpec, model_spec_from_file
from compiler.targets.registry import target_named
from tests.exporter_library import read_once
from tests.zoo import idioms, outputs, sequence, vision, wrapped
from tests.zoo.entry import Entry

MODELS = {e.name: e for m in (vision, sequence, outputs, idioms, wrapped) for e in m.ENTRIES}
# Built for OpenVINO too, where kernels and formats differ; what is only about the export is built for one target.
BOTH_TARGETS = [
    "ResNet",
    "UNet",
    "Detector",
    "SuppressingDetector",
    "CeilPool",
    "BiLstm",
    "Gru",
    "StatefulLstm",
    "EncoderDecoder",
    "Experts",
    "SparseExperts",
    "GroupedQuery",
    "KvCache",
    "MaskedWithInfinity",
]


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the models are tiny: threads would only wait for each other
    with read_once():
        yield
    torch.set_num_threads(threads)


def _build(entry: Entry, folder: Path, target: str = "onnxruntime", **more: str) -> tuple[ModelSpec, BuildResult]:
    folder.mkdir(exist_ok=True)
    spec = model_spec_from_file(entry.write(folder, target, **more))
    return spec, compile_model(spec, Repository(folder / "repo"))


def _agrees_elsewhere(entry: Entry, spec: ModelSpec, result: BuildResult) -> None:
    """Runs the shipped file against a fresh eager model, at sizes, values and masks that no parity case had."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = entry.build().eval()
    manifest = result.published.manifest
    run = target_named(manifest["target"]).open(result.published.folder, 1, manifest["artifact"])
    assert run is not None
    names = [o.name for o in spec.outputs]
    for number in range(3):
        rng = np.random.default_rng(number)
        sizes = {d.name: int(rng.integers(d.min, d.max, endpoint=True)) for d in spec.dims.values()}
        case = make_case(spec, f"elsewhere {number}", sizes, padded=True)
        inputs = {name: torch.from_numpy(array.copy()) for name, array in case.inputs.items()}
        with torch.inference_mode():
            want = flatten_outputs(module(**nested_inputs(inputs)), names)
        got = run(case.inputs)
        for name, tensor in zip(names, want, strict=True):
            np.testing.assert_allclose(got[name], tensor.numpy(), rtol=1e-3, atol=2e-5, err_msg=f"{name} {sizes}")


@pytest.mark.parametrize("entry", MODELS.values(), ids=MODELS)
def test_each_model_is_proved_or_refused_with_what_to_change(entry, tmp_path):
    if entry.refused:
        with pytest.raises(ModelkilnError) as error:
            _build(entry, tmp_path)
        text = str(error.value)
        assert all(words in text for words in entry.refused), text
        assert "\n  hint: " in text and "Traceback" not in text
        assert not (tmp_path / "repo").exists()
        return
    both = entry.name in BOTH_TARGETS
    spec, result = _build(entry, tmp_path, "auto" if both else "onnxruntime")
    manifest = result.published.manifest
    refusals = {c["target"]: c["refused"] for c in manifest["candidates"]}
    assert refusals == {target: "" for target in ("onnxruntime", *(["openvino"] if both else []))}
    assert manifest["parity"]["artifact_was_run"] and manifest["parity"]["num_cases"] >= 3
    assert [o["name"] for o in manifest["outputs"]] == [o.name for o in spec.outputs]
    _agrees_elsewhere(entry, spec, result)


LOWER = [
    ("ResNet", "fp16"),
    ("GroupedQuery", "fp16"),
    ("BiLstm", "fp16"),
    ("Experts", "int8_dynamic"),
    ("ResNet", "int8"),
]


@pytest.mark.parametrize(("name", "precision"), LOWER)
def test_a_lower_precision_is_proved_or_its_hold_backs_are_named(name, precision, tmp_path):
    entry, more = MODELS[name], ""
    if precision == "int8":
        rng = np.random.default_rng(0)
        (tmp_path / "data").mkdir()
        for i in range(4):
            pixels = rng.uniform(-4, 4, (1, 3, 24, 24)).astype(np.float32)
            np.savez(tmp_path / "data" / f"{i}.npz", pixels=pixels)
        more = "calibration: data\n"
    _, result = _build(entry, tmp_path, precision=precision, more=more)
    manifest = result.published.manifest
    limit = {"fp16": 0.9999, "int8": 0.99, "int8_dynamic": 0.99}[precision]
    assert manifest["precision"] == precision and min(c["worst_cosine"] for c in manifest["candidates"]) >= limit
    notes = [n for p in manifest["passes"] if p["name"] == f"convert_to_{precision}" for n in p["notes"]]
    held = [n for n in notes if "is held in fp32" in n]
    assert all(": " in n for n in held), held


@pytest.mark.parametrize("name", ["generated", "BiLstm", "SparseExperts", "ReturnsInput"])
def test_two_builds_are_byte_identical(name, tmp_path):
    files = []
    for number in ("one", "two"):
        _, result = _build(MODELS[name], tmp_path / number)
        files.append((result.published.folder / "model.onnx").read_bytes())
    assert files[0] == files[1]


def test_a06_a_model_over_the_limit_of_one_file_gets_external_data_and_is_proved(tmp_path, monkeypatch):
    """The limit is lowered to 1 MiB: 2 MiB of weights lie beside the graph, each byte once."""
    import onnx

    from compiler.targets import onnxruntime as target

    def write(model, folder, spec):
        target.write_onnx(model, folder, threshold_bytes=1 << 20)
        return {}

    monkeypatch.setattr(target, "TARGET", dataclasses.replace(target.TARGET, write=write))
    entry = MODELS["BigTable"]
    spec, result = _build(entry, tmp_path)
    folder = result.published.folder
    assert (folder / "model.onnx").stat().st_size < 1 << 16
    proto = onnx.load(str(folder / "model.onnx"), load_external_data=False)
    entries = [{e.key: e.value for e in i.external_data} for i in proto.graph.initializer if i.external_data]
    assert {e["location"] for e in entries} == {"model.onnx.data"}
    # a07: no byte of the file belongs to nothing.
    assert sum(int(e["length"]) for e in entries) == (folder / "model.onnx.data").stat().st_size == 16384 * 32 * 4
    assert {"model.onnx", "model.onnx.data"} <= set(result.published.manifest["files"])
    _agrees_elsewhere(entry, spec, result)


def test_recurrent_layers_are_one_operator_each(tmp_path):
    """Not one node per step: the graph of any length, and the kernel that was written for it."""
    for name, operators in (("BiLstm", {"LSTM": 2}), ("Gru", {"GRU": 1}), ("PlainRnn", {"RNN": 2})):
        _, result = _build(MODELS[name], tmp_path / name)
        ops = result.published.manifest["graph"]["shipped"]["ops"]
        assert {o: n for o, n in ops.items() if o in ("LSTM", "GRU", "RNN", "Loop", "Scan")} == operators
        assert "Sigmoid" not in ops and "Tanh" not in ops


def test_state_that_nothing_reads_is_told(tmp_path):
    _, result = _build(MODELS["CountsQuietly"], tmp_path)
    assert result.published.manifest["source"]["notes"] == [
        "note: forward changes calls; the file does not, and no output depends on it"
    ]


def test_a_rewrite_on_the_way_is_told_by_line(tmp_path):
    _, result = _build(MODELS["IntegerMask"], tmp_path)
    (note,) = result.published.manifest["source"]["notes"]
    assert note.startswith("note: the integers are cast before the number is subtracted from, at sequence.py:")
