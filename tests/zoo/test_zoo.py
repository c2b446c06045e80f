"""Each model of the zoo is built and proved, or refused with words that say what to change."""

from __future__ import annotations

import functools
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
def one_registry() -> Iterator[None]:
    """The exporter reads its whole library of operators again for each export: once is enough for all of these."""
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    original, threads = ONNXRegistry.__dict__["from_torchlib"], torch.get_num_threads()
    torch.set_num_threads(1)  # the models are tiny: threads would only wait for each other
    ONNXRegistry.from_torchlib = staticmethod(functools.cache(ONNXRegistry.from_torchlib))
    yield
    ONNXRegistry.from_torchlib = original
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
