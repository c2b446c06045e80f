"""Real TensorRT-RTX engines, built here without a GPU: what is taken, what is refused and what the manifest learns."""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np
import onnx
import onnx_ir
import pytest
from onnx import TensorProto

from compiler.engine_host import Gpu, host_gpus
from compiler.errors import ModelRefused
from compiler.targets.onnxruntime import open_session, write_onnx
from compiler.targets.registry import SOURCE_FILE, target_named
from compiler.targets.tensorrt import write_engine
from compiler.targets.tensorrt_build import parse_onnx
from compiler.targets.tensorrt_inspect import precisions_of_inspection, refuse_lost_precision, wide_integers
from compiler.targets.tensorrt_library import TENSORRT, TENSORRT_RTX
from tests.compiler.tensorrt_models import CNN_SPEC, ROWS_SPEC, cnn, graph, node, passed, rows, spec_from

trt = pytest.importorskip("tensorrt_rtx", reason="pip install 'modelkiln[rtx]'")

INT64 = TensorProto.INT64


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch):
    """What is asserted here holds without a GPU, also where the tests run on a machine that has one."""
    monkeypatch.setattr("compiler.targets.tensorrt.host_gpus", tuple)


def _write(folder, proto, text=CNN_SPEC, precision="fp32"):
    """Builds an engine of a graph, passes included; returns the facts for the manifest."""
    spec = dataclasses.replace(spec_from(folder, text), precision=precision)
    files = folder / "version"
    files.mkdir()
    return target_named("tensorrt-rtx").write(passed(proto), files, spec)


def _refused(folder, *arguments, **options):
    with pytest.raises(ModelRefused) as error:
        _write(folder, *arguments, **options)
    assert not (folder / "version" / "model.plan").exists()
    return str(error.value)


def test_an_fp32_engine_and_its_facts(tmp_path):
    facts = _write(tmp_path, cnn(), CNN_SPEC + "engine: {compute_capabilities: [8.6, 8.9], workspace: 1GiB}\n")
    engine, source = tmp_path / "version" / "model.plan", tmp_path / "version" / "source.onnx"
    assert facts.pop("bytes") == engine.stat().st_size > 100_000
    assert facts.pop("build_seconds") >= 0
    assert facts == {
        "library": "tensorrt-rtx",
        "library_version": trt.__version__,
        "compute_capabilities": ["8.6", "8.9"],
        "profile": {"x": {"min": [1, 3, 8, 8], "opt": [4, 3, 8, 8], "max": [8, 3, 8, 8]}},
        "builder": {
            "builder_optimization_level": None,
            "compute_capabilities": ["8.6", "8.9"],
            "refit": False,
            "tf32": False,
            "workspace_bytes": 1 << 30,
        },
        "num_layers": 2,
        "layers_by_precision": {"fp32": 2},
        "precision_read_from": "network",
        "int64_constants": [],
        "built_from": {"file": "source.onnx", "sha256": hashlib.sha256(source.read_bytes()).hexdigest()},
        "notes": ["layers by precision, read from the network: fp32 2"],
    }


def test_the_source_beside_the_engine_is_the_graph_and_runs(tmp_path):
    _write(tmp_path, cnn())
    x = np.random.default_rng(0).standard_normal((3, 3, 8, 8)).astype(np.float32)
    got = open_session(tmp_path / "version", 1, SOURCE_FILE)({"x": x})["y"]
    assert got.shape == (3, 4, 8, 8) and (got >= 0).all()
    assert target_named("tensorrt-rtx").interface(tmp_path / "version")[0][0].shape == ("batch", 3, 8, 8)


def test_the_gpus_that_are_named_change_the_engine(tmp_path):
    engines = []
    for index, capability in enumerate(("7.5", "8.6")):
        folder = tmp_path / str(index)
        folder.mkdir()
        _write(folder, cnn(), CNN_SPEC + f"engine: {{compute_capabilities: [{capability}]}}\n")
        engines.append((folder / "version" / "model.plan").read_bytes())
    assert engines[0] != engines[1]


def test_b20_an_fp16_graph_gives_fp16_layers(tmp_path):
    facts = _write(tmp_path, cnn(half=True), precision="fp16")
    assert facts["layers_by_precision"] == {"fp16": 2}  # the casts compute nothing
    assert facts["num_layers"] == 4


def test_b20_fp16_that_the_graph_does_not_carry_is_refused(tmp_path):
    assert _refused(tmp_path, cnn(), precision="fp16").startswith(
        "precision fp16 was asked for, and no layer of the engine has it; layers by precision, read from the network: "
        "fp32 2\n"
    )


def test_b20_casts_alone_are_no_fp16(tmp_path):
    nodes = [
        node("Relu", "x", "a", "relu"),
        node("Cast", "a", "h", "down", to=TensorProto.FLOAT16),
        node("Cast", "h", "y", "up", to=TensorProto.FLOAT),
    ]
    assert "precision fp16 was asked for" in _refused(tmp_path, rows(*nodes), ROWS_SPEC, precision="fp16")


def test_b20_the_inspectors_words_for_a_type_are_understood():
    def layer(text):
        return {"Name": "a", "LayerType": "gemm", "Outputs": [{"Name": "y", "Format/Datatype": text}]}

    words = ["Half", "Row major linear FP16 format", "Float", "Row major linear FP32", "BFloat16", "Int8", "Int64"]
    words += ["Thirty-two wide channel vectorized row major Int8 format."]
    text = str({"Layers": [layer(w) for w in words]}).replace("'", '"')
    found = precisions_of_inspection(text)
    assert found == {"bf16": 1, "fp16": 2, "fp32": 2, "int64": 1, "int8": 2}
    refuse_lost_precision("fp16", found, "engine inspector")
    # LAYER_NAMES_ONLY gives text in place of tables: nothing is known then, and nothing is claimed.
    assert precisions_of_inspection('{"Layers": ["conv1", "relu"]}') == {}
    with pytest.raises(ModelRefused, match=r"precision fp16 .* read from the engine inspector: fp32 1"):
        refuse_lost_precision("fp16", {"fp32": 1}, "engine inspector")


def test_a_precision_that_the_target_lacks_is_refused(tmp_path):
    message = "the target 'tensorrt-rtx' has no precision fp64; allowed: bf16, fp16, fp32, int8"
    assert _refused(tmp_path, cnn(), precision="fp64") == message


def test_int8_from_quantize_and_dequantize_nodes(tmp_path):
    """Symmetric, signed, no quantised bias: the form that the parser takes."""
    constants = {"s": np.float32(0.05), "z": np.int8(0), "w": np.ones((16, 4), np.float32)}
    nodes = [
        node("QuantizeLinear", "x s z", "q", "quantize"),
        node("DequantizeLinear", "q s z", "d", "dequantize"),
        node("QuantizeLinear", "w s z", "wq", "quantize_w"),
        node("DequantizeLinear", "wq s z", "wd", "dequantize_w"),
        node("MatMul", "d wd", "y", "product"),
    ]
    facts = _write(tmp_path, rows(*nodes, constants=constants, width=4), ROWS_SPEC, precision="int8")
    assert facts["layers_by_precision"]["int8"] >= 1


def test_unsupported_operators_are_all_named(tmp_path):
    nodes = [
        node("DynamicQuantizeLinear", "x", "q s z", "quantize_x"),
        node("Cast", "q", "c", "cast", to=TensorProto.FLOAT),
        node("Det", "square", "d", "determinant"),
        node("Add", "c s", "e", "add"),
        node("Add", "e d", "y", "add_2"),
    ]
    proto = rows(*nodes, constants={"square": np.eye(3, dtype=np.float32)})
    spec = spec_from(tmp_path, ROWS_SPEC)
    with pytest.raises(ModelRefused) as error:  # without the passes, which would fold the constant
        target_named("tensorrt-rtx").write(onnx_ir.from_proto(proto), tmp_path, spec)
    assert error.value.message == (
        f"tensorrt-rtx {trt.__version__} cannot take 2 node(s): 'quantize_x' (DynamicQuantizeLinear), "
        "'determinant' (Det)"
    )
    assert "use target: onnxruntime" in error.value.hint


def test_com_microsoft_operators_are_refused_by_name_and_never_made_by_our_passes(tmp_path):
    bias = [node("BiasGelu", "x b", "y", "fused", domain="com.microsoft")]
    proto = rows(*bias, constants={"b": np.ones(16, np.float32)})
    proto.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    assert "'fused' (BiasGelu)" in _refused(tmp_path, proto, ROWS_SPEC)


def test_a16_a_computed_argument_of_pad_is_folded_before_parsing(tmp_path):
    constants = {"left": np.array([0, 1]), "right": np.array([0, 1])}
    nodes = [node("Concat", "left right", "pads", "concat", axis=0), node("Pad", "x pads", "y", "pad")]
    facts = _write(tmp_path, rows(*nodes, constants=constants, width=18), ROWS_SPEC)
    graph_of = onnx.load(tmp_path / "version" / "source.onnx").graph
    assert [n.op_type for n in graph_of.node] == ["Pad"]
    assert facts["bytes"] > 0


def test_a15_the_end_of_a_slice_is_accepted_quietly(tmp_path):
    constants = {"start": np.array([1]), "end": np.array([2**63 - 1]), "axis": np.array([1])}
    facts = _write(
        tmp_path, rows(node("Slice", "x start end axis", "y", "slice"), constants=constants, width=15), ROWS_SPEC
    )
    assert [(f["read_by"], f["held_as"]) for f in facts["int64_constants"]] == [(["slice (Slice)"], "int64")]
    assert facts["notes"] == ["layers by precision, read from the network: fp32 1, int64 14"]


def test_a15_a_wide_constant_in_arithmetic_is_kept_and_reported_with_its_reader(tmp_path):
    text = ROWS_SPEC.replace("dtype: float32", "dtype: int64, range: [0, 9]").replace(", shape: [batch, 16]}", "}")
    text = text.replace("range: [0, 9]}", "range: [0, 9], shape: [batch, 16]}")
    proto = rows(node("Add", "x k", "y", "plus"), constants={"k": np.array([2**40])}, kind=INT64)
    facts = _write(tmp_path, proto, text)
    assert facts["int64_constants"] == [
        {"name": "k", "min": 2**40, "max": 2**40, "read_by": ["plus (Add)"], "held_as": "int64"}
    ]
    assert "int64 constant 'k' is outside int32 (plus (Add)): int64" in facts["notes"]


def test_a15_a_constant_that_the_network_narrowed_is_refused():
    model = onnx_ir.from_proto(rows(node("Add", "x k", "y", "plus"), constants={"k": np.array([2**40])}, kind=INT64))
    network = trt.Builder(trt.Logger(trt.Logger.ERROR)).create_network(1)
    layer = network.add_constant((1,), np.array([2**31 - 1], dtype=np.int32))
    layer.name = "k"
    with pytest.raises(
        ModelRefused, match=r"'k' \(1099511627776 to .*\), read by plus \(Add\), does not fit the int32"
    ):
        wide_integers(trt, model, network)


def test_c10_a_graph_that_fixed_the_batch_stops_the_build(tmp_path):
    message = _refused(tmp_path, cnn(batch=1))
    assert "input 'x' is [1, 3, 8, 8] in the network: axis 0 is fixed to 1, and the spec lets it vary from 1 to 8" in (
        message
    )


def test_a_model_without_dims_builds(tmp_path):
    text = CNN_SPEC.replace("dims:\n  batch: {min: 1, opt: 4, max: 8}\n", "").replace("[batch,", "[2,")
    facts = _write(tmp_path, cnn(batch=2), text)
    assert facts["profile"] == {"x": {"min": [2, 3, 8, 8], "opt": [2, 3, 8, 8], "max": [2, 3, 8, 8]}}


def test_float64_outside_is_refused_and_inside_is_reported(tmp_path):
    message = _refused(tmp_path, rows(node("Relu", "x", "y", "relu"), kind=TensorProto.DOUBLE), ROWS_SPEC)
    assert "input 'x' is float64 in the graph and DataType.FLOAT in tensorrt-rtx, which has no float64" in message
    nodes = [
        node("Cast", "x", "wide", "up", to=TensorProto.DOUBLE),
        node("Mul", "wide wide", "square", "square"),
        node("Cast", "square", "y", "down", to=TensorProto.FLOAT),
    ]
    inside = tmp_path / "inside"
    inside.mkdir()
    assert "float64 is computed in fp32: wide, square" in _write(inside, rows(*nodes), ROWS_SPEC)["notes"]


def test_an_input_whose_values_are_a_shape_is_refused(tmp_path):
    text = ROWS_SPEC.replace("outputs:", "  - {name: n, dtype: int64, shape: [2], range: [1, 16]}\noutputs:").replace(
        "dims:\n  batch: {min: 1, opt: 4, max: 8}\n", ""
    )
    proto = graph(
        [node("Reshape", "x n", "y", "reshape")],
        {"x": (TensorProto.FLOAT, [2, 16]), "n": (INT64, [2])},
        {"y": (TensorProto.FLOAT, ["a", "b"])},
    )
    message = _refused(tmp_path, proto, text.replace("[batch, 16]", "[2, 16]"))
    assert "the values of input 'n' decide the shape of a tensor" in message


@pytest.mark.skipif(bool(host_gpus()), reason="with a GPU, refit builds")
def test_refit_without_a_gpu_says_what_is_missing(tmp_path):
    message = _refused(tmp_path, cnn(), CNN_SPEC + "engine: {refit: true}\n")
    assert "cannot build the engine" in message and "only on a machine with a GPU; drop engine.refit" in message


def test_bf16_is_not_for_compute_capability_7_5(tmp_path):
    nodes = [
        node("Cast", "x", "b", "down", to=TensorProto.BFLOAT16),
        node("MatMul", "b w", "c", "product"),
        node("Cast", "c", "y", "up", to=TensorProto.FLOAT),
    ]
    proto = rows(*nodes, width=4)
    weight = onnx.helper.make_tensor("w", TensorProto.BFLOAT16, [16, 4], np.ones(64, np.float32))
    proto.graph.initializer.append(weight)
    message = _refused(tmp_path, proto, ROWS_SPEC + "engine: {compute_capabilities: [7.5]}\n", precision="bf16")
    assert "compute capability 7.5 has no bf16; drop it from engine.compute_capabilities" in message
    newer = tmp_path / "newer"
    newer.mkdir()
    facts = _write(newer, proto, ROWS_SPEC, precision="bf16")
    assert facts["layers_by_precision"] == {"bf16": 1}


def test_an_option_that_the_library_does_not_take_is_read_back(tmp_path):
    spec = spec_from(tmp_path, CNN_SPEC)
    spec = dataclasses.replace(spec, engine=dataclasses.replace(spec.engine, builder_optimization_level=9))
    with pytest.raises(ModelRefused, match=r"engine.builder_optimization_level is 9, and tensorrt-rtx .* set 5"):
        target_named("tensorrt-rtx").write(passed(cnn()), tmp_path, spec)


@pytest.mark.filterwarnings("ignore:.*no-ops in TensorRT-RTX:DeprecationWarning")
def test_the_code_of_tensorrt_runs_on_its_sibling(tmp_path, monkeypatch):
    """TensorRT needs a GPU to build; the same calls, its own options among them, are made on TensorRT-RTX here.

    The sibling ignores those options, so this shows that the calls are right, not what they do.
    """
    library = dataclasses.replace(TENSORRT, module="tensorrt_rtx", versions=TENSORRT_RTX.versions)
    for module in ("tensorrt", "tensorrt_library"):
        monkeypatch.setattr(f"compiler.targets.{module}.host_gpus", lambda: (Gpu("NVIDIA A10", "8.6"),))
    options = "engine: {timing_cache: cache/timing.bin, hardware_compatibility: ampere_plus, tf32: true}\n"
    spec = spec_from(tmp_path, CNN_SPEC.replace("tensorrt-rtx", "tensorrt") + options)
    for run in ("first", "second"):  # the second reads the cache that the first wrote
        (tmp_path / run).mkdir()
        facts = write_engine(library, passed(cnn(), "tensorrt"), tmp_path / run, spec)
        assert (tmp_path / "cache" / "timing.bin").stat().st_size > 0
        assert [p.name for p in (tmp_path / "cache").iterdir()] == ["timing.bin"]
    assert (facts["library"], facts["compute_capabilities"]) == ("tensorrt", ["8.6"])
    assert facts["builder"] == {
        "builder_optimization_level": None,
        "hardware_compatibility": "ampere_plus",
        "refit": False,
        "tf32": True,
        "timing_cache": "cache/timing.bin",
        "version_compatible": False,
        "workspace_bytes": None,
    }
    if not host_gpus():
        # The engine could not be loaded for its inspector, and the facts say where they are from.
        assert facts["precision_read_from"] == "network"


def test_weights_in_a_file_beside_the_graph_are_parsed(tmp_path):
    write_onnx(onnx_ir.from_proto(cnn()), tmp_path, threshold_bytes=1, name=SOURCE_FILE)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source.onnx", "source.onnx.data"]
    assert parse_onnx(TENSORRT_RTX, trt, tmp_path / SOURCE_FILE).network.num_layers == 2
