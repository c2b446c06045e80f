"""Every pass keeps what the graph computes, on graphs that nobody chose."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compiler.passes import Pass, passes_for
from compiler.passes.fold_constants import fold_constants
from compiler.passes.prune_inputs import prune_inputs
from compiler.passes.strip_metadata import strip_metadata
from compiler.targets.onnxruntime import open_session, write_onnx

ALL = {step.name: step for target in ("onnxruntime", "openvino") for step in passes_for(target)}
UNARY = ("Relu", "Tanh", "Sigmoid", "Neg", "Identity", "Erf", "Softmax", "Gelu")
BINARY = ("Add", "Mul", "Sub", "MatMul")
SIZE = 6


@st.composite
def graphs(draw) -> onnx.ModelProto:
    """A chain-and-branch graph over [batch, 6] values with constants, dead ends and repeated nodes."""
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    weights, nodes, values = {}, [], ["x", "z"]
    for index in range(draw(st.integers(1, 8))):
        name = f"v{index}"
        kind = draw(st.sampled_from(["unary", "binary", "constant", "norm", "shape", "repeat"]))
        source = draw(st.sampled_from(values))
        if kind == "unary":
            nodes.append(onnx.helper.make_node(draw(st.sampled_from(UNARY)), [source], [name]))
        elif kind == "binary":
            op = draw(st.sampled_from(BINARY[:3]))
            nodes.append(onnx.helper.make_node(op, [source, draw(st.sampled_from(values))], [name]))
        elif kind == "constant":
            weights[f"w{index}"] = rng.standard_normal((SIZE, SIZE)).astype(np.float32)
            nodes.append(onnx.helper.make_node("Tanh", [f"w{index}"], [f"c{index}"]))
            nodes.append(onnx.helper.make_node("MatMul", [source, f"c{index}"], [name]))
        elif kind == "norm":
            weights[f"s{index}"] = rng.standard_normal(SIZE).astype(np.float32)
            nodes.append(onnx.helper.make_node("LayerNormalization", [source, f"s{index}"], [name]))
        elif kind == "shape":
            nodes.append(onnx.helper.make_node("Shape", [source], [f"shape{index}"]))
            nodes.append(onnx.helper.make_node("Transpose", [source], [f"t{index}"], perm=[1, 0]))
            nodes.append(onnx.helper.make_node("Transpose", [f"t{index}"], [f"u{index}"], perm=[1, 0]))
            nodes.append(onnx.helper.make_node("Reshape", [f"u{index}", f"shape{index}"], [name]))
        else:
            nodes.append(onnx.helper.make_node("Relu", [source], [f"a{index}"]))
            nodes.append(onnx.helper.make_node("Relu", [source], [f"b{index}"]))
            nodes.append(onnx.helper.make_node("Add", [f"a{index}", f"b{index}"], [name]))
        values.append(name)
    nodes.append(onnx.helper.make_node("Identity", [draw(st.sampled_from(values))], ["y"]))
    graph = onnx.helper.make_graph(
        nodes,
        "g",
        [onnx.helper.make_tensor_value_info(n, 1, ["batch", SIZE]) for n in ("x", "z")],
        [onnx.helper.make_tensor_value_info("y", 1, ["batch", SIZE])],
        [onnx.numpy_helper.from_array(w, n) for n, w in weights.items()],
    )
    proto = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10)
    onnx.checker.check_model(proto)
    return proto


def _run(model: ir.Model, folder: Path, inputs: dict[str, np.ndarray]) -> np.ndarray:
    write_onnx(model, folder)
    return open_session(folder, 1)(inputs)["y"]


@pytest.mark.parametrize("step", ALL.values(), ids=ALL)
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(proto=graphs(), batch=st.integers(1, 4), seed=st.integers(0, 99))
def test_each_pass_keeps_the_output_of_a_random_graph(tmp_path, step: Pass, proto, batch, seed):
    rng = np.random.default_rng(seed)
    inputs = {n: rng.standard_normal((batch, SIZE)).astype(np.float32) for n in ("x", "z")}
    want = _run(ir.from_proto(proto), tmp_path, inputs)
    result = step.run(ir.from_proto(proto))
    assert all(count >= 0 for count in result.counts.values())
    got = _run(result.model, tmp_path, inputs)
    # Fused kernels sum in another order; values grow with repeated multiplications.
    np.testing.assert_allclose(got, want, rtol=2e-4, atol=1e-5 * max(1.0, float(np.abs(want).max())))


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(proto=graphs())
def test_all_passes_in_order_keep_the_output(tmp_path, proto):
    inputs = {n: np.full((2, SIZE), 0.5, dtype=np.float32) for n in ("x", "z")}
    want = _run(ir.from_proto(proto), tmp_path, inputs)
    for target in ("onnxruntime", "openvino"):
        model = ir.from_proto(proto)
        for step in passes_for(target):
            model = step.run(model).model
        got = _run(model, tmp_path, inputs)
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=1e-5 * max(1.0, float(np.abs(want).max())))


def test_batch_normalisation_goes_into_the_convolution(tmp_path):
    rng = np.random.default_rng(0)
    weights = {
        "w": rng.standard_normal((4, 3, 3, 3)), "scale": rng.uniform(0.5, 2, 4), "bias": rng.standard_normal(4),
        "mean": rng.standard_normal(4), "var": rng.uniform(0.5, 2, 4),
    }  # fmt: skip
    nodes = [
        onnx.helper.make_node("Conv", ["x", "w"], ["h"], kernel_shape=[3, 3]),
        onnx.helper.make_node("BatchNormalization", ["h", "scale", "bias", "mean", "var"], ["y"]),
    ]
    graph = onnx.helper.make_graph(
        nodes,
        "g",
        [onnx.helper.make_tensor_value_info("x", 1, ["batch", 3, 8, 8])],
        [onnx.helper.make_tensor_value_info("y", 1, ["batch", 4, 6, 6])],
        [onnx.numpy_helper.from_array(w.astype(np.float32), n) for n, w in weights.items()],
    )
    proto = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10)
    inputs = {"x": rng.standard_normal((2, 3, 8, 8)).astype(np.float32)}
    want = _run(ir.from_proto(proto), tmp_path, inputs)
    result = fold_constants(ir.from_proto(proto))
    assert result.counts["batch_normalization"] == 1
    assert [node.op_type for node in result.model.graph] == ["Conv"]
    np.testing.assert_allclose(_run(result.model, tmp_path, inputs), want, rtol=1e-4, atol=1e-5)


def _tiny(nodes, inputs=("x",)) -> ir.Model:
    graph = onnx.helper.make_graph(
        nodes,
        "g",
        [onnx.helper.make_tensor_value_info(n, 1, ["batch", SIZE]) for n in inputs],
        [onnx.helper.make_tensor_value_info("y", 1, ["batch", SIZE])],
    )
    return ir.from_proto(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10))


def test_a08_prune_inputs_tells_which(tmp_path):
    result = prune_inputs(_tiny([onnx.helper.make_node("Relu", ["x"], ["y"])], ("x", "unused")))
    assert [v.name for v in result.model.graph.inputs] == ["x"]
    assert result.notes == ("input 'unused' was pruned: no output depends on it",)


def test_strip_metadata_leaves_no_trace_of_the_machine(tmp_path):
    model = _tiny([onnx.helper.make_node("Relu", ["x"], ["y"])])
    node = next(iter(model.graph))
    node.metadata_props["pkg.torch.onnx.stack_trace"] = 'File "/home/somebody/model.py", line 3'
    node.outputs[0].metadata_props["where"] = "/home/somebody"
    model.graph.doc_string = "/home/somebody"
    result = strip_metadata(model)
    assert result.counts == {"nodes_cleaned": 1}
    write_onnx(result.model, tmp_path)
    assert b"somebody" not in (tmp_path / "model.onnx").read_bytes()
