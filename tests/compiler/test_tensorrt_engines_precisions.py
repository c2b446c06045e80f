"""Real TensorRT-RTX engines of the demo's encoder and of a ResNet-18 in fp32, fp16 and int8, built without a GPU.

The precision of each layer is read back from the network (the engine's inspector needs a GPU to load it; on a machine
that has one, `tests/gpu` reads the engine). No engine is run here.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from compiler.cases import export_sizes, make_case, precision_cases
from compiler.engine_options import EngineOptions
from compiler.passes import passes_for
from compiler.precision import PrecisionResult, convert
from compiler.precision.accuracy import agreement
from compiler.precision.calibration_data import calibration_samples
from compiler.precision.graph import prepare
from compiler.precision.observe import run_outputs
from compiler.sources import open_source
from compiler.spec import ModelSpec, model_spec_from_file
from compiler.targets.onnxruntime import open_session
from compiler.targets.registry import SOURCE_FILE, target_named
from compiler.targets.tensorrt_build import parse_onnx
from compiler.targets.tensorrt_library import TENSORRT_RTX
from tests.compiler.tensorrt_models import spec_from

pytestmark = pytest.mark.usefixtures("exporter_library")  # once for all exports of this module

trt = pytest.importorskip("tensorrt_rtx", reason="pip install 'modelkiln[rtx]'")

ENCODER = Path("ensembles/text_embedding/encoder.yaml")
RESNET_SPEC = """\
name: resnet18
source: {factory: nothing:build}
target: tensorrt-rtx
dims:
  batch: {min: 1, opt: 8, max: 32}
inputs:
  - {name: x, dtype: float32, shape: [batch, 3, 224, 224]}
outputs:
  - {name: y}
engine: {compute_capabilities: [8.6]}
"""


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch):
    """What is asserted here holds without a GPU, also where the tests run on a machine that has one."""
    monkeypatch.setattr("compiler.targets.tensorrt.host_gpus", tuple)


def _passed(model: ir.Model) -> ir.Model:
    for step in passes_for("tensorrt-rtx"):
        model = step.run(model).model
    return model


@pytest.fixture(scope="module")
def encoder() -> tuple[ModelSpec, ir.Model]:
    """The demo's encoder with its real weights, as the passes leave it."""
    pytest.importorskip("tokenizers")
    spec = model_spec_from_file(ENCODER)
    exported = open_source(spec).export(make_case(spec, "export", export_sizes(spec), padded=False))
    engine = EngineOptions(compute_capabilities=("8.6",))
    return dataclasses.replace(spec, target="tensorrt-rtx", engine=engine), _passed(exported.model)


@pytest.fixture(scope="module")
def resnet(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelSpec, ir.Model]:
    """A ResNet-18 with random weights."""
    from perf.benchmarks.precisions import resnet18

    return spec_from(tmp_path_factory.mktemp("resnet"), RESNET_SPEC), _passed(resnet18())


@dataclasses.dataclass(frozen=True)
class Built:
    """An engine's facts, and of each kind of layer how many give which type, read from the parsed network."""

    facts: dict[str, Any]
    layers: dict[str, Counter[str]]
    folder: Path


def _engine(folder: Path, spec: ModelSpec, model: ir.Model, precision: str) -> Built:
    files = folder / "version"
    files.mkdir()
    facts = target_named("tensorrt-rtx").write(model, files, dataclasses.replace(spec, precision=precision))
    assert (files / "model.plan").stat().st_size == facts["bytes"] > 100_000
    assert facts["precision_read_from"] == "network" and facts["compute_capabilities"] == ["8.6"]
    network = parse_onnx(TENSORRT_RTX, trt, files / SOURCE_FILE).network
    layers: dict[str, Counter[str]] = {}
    for layer in (network.get_layer(i) for i in range(network.num_layers)):
        layers.setdefault(layer.type.name, Counter())[layer.get_output(0).dtype.name] += 1
    return Built(facts, layers, files)


def _agreement(built: Built, model: ir.Model, sample: dict[str, Any]) -> float:
    """Returns how near the file that the engine was built from is to fp32, run by ONNX Runtime."""
    return agreement(run_outputs(prepare(model), [sample]), [open_session(built.folder, 0, SOURCE_FILE)(sample)])


def _is_symmetric_int8(built: Built, result: PrecisionResult) -> None:
    """Each pair is in the network, each weight is int8, no bias is int32, no zero point is other than 0."""
    nodes, pairs = result.counts["quantized_nodes"], result.counts["qdq_pairs"]
    assert built.facts["layers_by_precision"]["int8"] == pairs
    assert built.layers["QUANTIZE"] == {"INT8": pairs} and built.layers["DEQUANTIZE"] == {"FLOAT": pairs + nodes}
    constants = [v.const_value.numpy() for v in result.model.graph.initializers.values()]
    assert not any(c.dtype in (np.uint8, np.int32) for c in constants)
    names = [n for n in result.model.graph.initializers if n.endswith("zero_point")]
    assert len(names) == pairs + nodes
    assert not any(result.model.graph.initializers[n].const_value.numpy().any() for n in names)


def test_the_encoder_in_fp32(tmp_path, encoder):
    spec, model = encoder
    built = _engine(tmp_path, spec, model, "fp32")
    assert set(built.facts["layers_by_precision"]) == {"fp32", "int64"}
    # 36 products with weights, and two in each of six attentions.
    assert built.layers["MATRIX_MULTIPLY"] == {"FLOAT": 48} and built.layers["SOFTMAX"] == {"FLOAT": 6}
    [sample] = [dict(c.inputs) for c in precision_cases(spec)[:1]]
    assert _agreement(built, model, sample) > 0.999999


def test_the_encoder_in_fp16(tmp_path, encoder):
    spec, model = encoder
    samples = [dict(c.inputs) for c in precision_cases(spec)]
    result = convert(model, "fp16", "tensorrt-rtx", samples)
    built = _engine(tmp_path, spec, result.model, "fp16")
    assert built.layers["MATRIX_MULTIPLY"] == {"HALF": 48}
    # Held for the mask constant, which is -inf in fp16; and the normalisations whose sums of squares are too large.
    held = Counter(h.op_type for h in result.held)
    assert built.layers["SOFTMAX"] == {"FLOAT": 6} and held["Softmax"] == 6
    norms = held["LayerNormalization"]
    assert built.layers["NORMALIZATION"] == {"HALF": 13 - norms, "FLOAT": norms} and 0 < norms < 4
    # Their epsilon of 1e-12 alone is no reason: the variances on the samples are large enough.
    assert any("epsilon of 13 normalisation(s) is 0 in fp16 and makes no difference" in n for n in result.notes)
    assert built.facts["bytes"] < 60_000_000  # 95 MB in fp32
    assert _agreement(built, model, samples[0]) > 0.9999


def test_the_encoder_in_int8(tmp_path, encoder):
    spec, model = encoder
    samples = calibration_samples(spec, [i.name for i in spec.inputs])
    edges = [dict(c.inputs) for c in precision_cases(spec)]
    result = convert(model, "int8", "tensorrt-rtx", samples, edges=edges)
    assert result.agreement >= 0.99 and result.counts["quantized_nodes"] + len(result.held) == 36
    assert result.counts["quantized_nodes"] >= 18
    built = _engine(tmp_path, spec, result.model, "int8")
    _is_symmetric_int8(built, result)
    assert min(_agreement(built, model, s) for s in (samples[0], *edges)) > 0.98


@pytest.mark.parametrize(("precision", "megabytes"), [("fp32", 50), ("fp16", 25), ("int8", 16)])
def test_the_resnet(tmp_path, resnet, precision, megabytes):
    spec, model = resnet
    rng = np.random.default_rng(0)
    samples = [{"x": rng.standard_normal((2, 3, 224, 224)).astype(np.float32)} for _ in range(2)]
    result = convert(model, precision, "tensorrt-rtx", samples)
    built = _engine(tmp_path, spec, result.model, precision)
    kind = "HALF" if precision == "fp16" else "FLOAT"
    # In int8 a convolution gives fp32 and reads int8: the builder fuses the pairs around it.
    assert built.layers["CONVOLUTION"] == {kind: 20} and built.layers["MATRIX_MULTIPLY"] == {kind: 1}
    if precision == "int8":
        assert result.held == () and result.counts["quantized_nodes"] == 21
        _is_symmetric_int8(built, result)
    else:
        assert set(built.facts["layers_by_precision"]) == {precision}
    assert built.facts["bytes"] < megabytes * 1_000_000
    assert _agreement(built, model, samples[0]) > 0.999
