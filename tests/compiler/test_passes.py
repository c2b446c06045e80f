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
from compiler.passes.cancel_casts import cancel_casts
from compiler.passes.fold_constants import fold_constants
from compiler.passes.merge_products import merge_products
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


def _projections(biased: tuple[bool, ...], rank: int = 3, outputs: tuple[str, ...] = ()) -> onnx.ModelProto:
    """Products of one input with constant weights of widths 4, 5, 6, ..., each squared so that none is an output."""
    rng = np.random.default_rng(0)
    nodes, weights = [], {}
    for index, has_bias in enumerate(biased):
        weights[f"w{index}"] = rng.standard_normal((SIZE, 4 + index))
        nodes.append(onnx.helper.make_node("MatMul", ["x", f"w{index}"], [f"p{index}"]))
        last = f"p{index}"
        if has_bias:
            weights[f"b{index}"] = rng.standard_normal(4 + index)
            nodes.append(onnx.helper.make_node("Add", [f"b{index}", f"p{index}"], [f"a{index}"]))
            last = f"a{index}"
        nodes.append(onnx.helper.make_node("Mul", [last, last], [f"y{index}"]))
    shape = ["batch", "length", SIZE][-rank:]
    names = [*(f"y{i}" for i in range(len(biased))), *outputs]
    graph = onnx.helper.make_graph(
        nodes,
        "g",
        [onnx.helper.make_tensor_value_info("x", 1, shape)],
        [onnx.helper.make_tensor_value_info(n, 1, [*shape[:-1], 4 + int(n[1:])]) for n in names],
        [onnx.numpy_helper.from_array(w.astype(np.float32), n) for n, w in weights.items()],
    )
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10)


def _merged(proto: onnx.ModelProto, folder: Path, x: np.ndarray) -> tuple[dict[str, int], list[str]]:
    """Merges, compares every output before and after, and returns the counts and the operators left."""
    write_onnx(ir.from_proto(proto), folder)
    want = open_session(folder, 1)({"x": x})
    result = merge_products(ir.from_proto(proto))
    write_onnx(result.model, folder)
    onnx.checker.check_model(str(folder / "model.onnx"), full_check=True)
    got = open_session(folder, 1)({"x": x})
    assert set(got) == set(want)
    for name, array in want.items():
        np.testing.assert_allclose(got[name], array, rtol=1e-5, atol=1e-5)
    return result.counts, [node.op_type for node in result.model.graph if node.op_type != "Mul"]


X = np.random.default_rng(1).standard_normal((2, 3, SIZE)).astype(np.float32)


def test_query_key_and_value_become_one_product(tmp_path):
    counts, operators = _merged(_projections((True, True, True)), tmp_path, X)
    assert counts == {"products_merged": 3, "merged_into": 1} and operators == ["MatMul", "Add", "Split"]


def test_gate_and_up_without_biases_become_one_product(tmp_path):
    counts, operators = _merged(_projections((False, False), rank=2), tmp_path, X[0])
    assert counts == {"products_merged": 2, "merged_into": 1} and operators == ["MatMul", "Split"]


def test_products_with_and_without_a_bias_are_merged_apart(tmp_path):
    counts, operators = _merged(_projections((True, False, True, False)), tmp_path, X)
    assert counts == {"products_merged": 4, "merged_into": 2}
    assert sorted(operators) == ["Add", "MatMul", "MatMul", "Split", "Split"]


def test_a_product_that_is_an_output_or_alone_stays(tmp_path):
    counts, operators = _merged(_projections((False, False), outputs=("p1",)), tmp_path, X)
    assert counts == {"products_merged": 0, "merged_into": 0} and operators == ["MatMul", "MatMul"]


def test_a_weight_that_two_products_share_is_kept_for_the_one_that_stays(tmp_path):
    proto = _projections((False, False))
    proto.graph.node.append(onnx.helper.make_node("MatMul", ["z", "w0"], ["y2"]))
    proto.graph.input.append(onnx.helper.make_tensor_value_info("z", 1, ["batch", SIZE]))
    proto.graph.output.append(onnx.helper.make_tensor_value_info("y2", 1, ["batch", 4]))
    result = merge_products(ir.from_proto(proto))
    assert result.counts == {"products_merged": 2, "merged_into": 1} and "w0" in result.model.graph.initializers
    assert "w1" not in result.model.graph.initializers
    write_onnx(result.model, tmp_path)
    assert open_session(tmp_path, 1)({"x": X, "z": X[0]})["y2"].shape == (3, 4)


def _chain(nodes, extra=()) -> tuple[list[str], dict[str, int]]:
    """Folds a graph from x to y over [batch, 6] and returns its operators and the counts."""
    model = _tiny([*extra, *nodes])
    result = fold_constants(model)
    return [node.op_type for node in result.model.graph], result.counts


def _casts(*types: int) -> ir.Model:
    """A graph that casts x to each type in turn and ends with a Relu."""
    names = ["x", *(f"c{i}" for i in range(len(types)))]
    nodes = [onnx.helper.make_node("Cast", [a], [b], to=t) for a, b, t in zip(names, names[1:], types, strict=False)]
    return fold_constants(_tiny([*nodes, onnx.helper.make_node("Relu", [names[-1]], ["y"])])).model


@pytest.mark.parametrize(
    ("types", "left"),
    [
        ((onnx.TensorProto.DOUBLE, onnx.TensorProto.FLOAT), 0),  # widened and back: nothing
        ((onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT), 2),  # through fp16 is a rounding, which stays
        ((onnx.TensorProto.FLOAT16, onnx.TensorProto.DOUBLE, onnx.TensorProto.FLOAT), 2),  # one rounding, one way back
        ((onnx.TensorProto.INT64, onnx.TensorProto.FLOAT), 2),  # cuts the fraction off
    ],
)
def test_casts_are_cancelled_only_where_nothing_is_rounded(tmp_path, types, left):
    x = np.array([[0.1, -2.7, 3.3, 1e-9, 70.5, 2.0]], dtype=np.float32)
    want = _run(_casts(*types), tmp_path, {"x": x})
    result = cancel_casts(_casts(*types))
    assert [node.op_type for node in result.model.graph].count("Cast") == left
    np.testing.assert_array_equal(_run(result.model, tmp_path, {"x": x}), want)


def test_an_int64_in_a_float64_is_not_exact(tmp_path):
    """numpy calls this cast safe; 2**53 + 1 shows that it is not."""
    node = onnx.helper.make_node
    model = ir.from_proto(onnx.helper.make_model(onnx.helper.make_graph(
        [node("Cast", ["x"], ["d"], to=11), node("Cast", ["d"], ["i"], to=7), node("Abs", ["i"], ["y"])],
        "g",
        [onnx.helper.make_tensor_value_info("x", 7, [1])],
        [onnx.helper.make_tensor_value_info("y", 7, [1])],
    ), opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10))  # fmt: skip
    result = cancel_casts(fold_constants(model).model)
    assert result.counts == {"casts_cancelled": 0}
    assert _run(result.model, tmp_path, {"x": np.array([2**53 + 1])}).tolist() == [2**53]


def test_transposes_that_cancel_are_removed():
    node = onnx.helper.make_node
    pair = [node("Transpose", ["x"], ["t"], perm=[1, 0]), node("Transpose", ["t"], ["u"], perm=[1, 0])]
    operators, counts = _chain([*pair, node("Relu", ["u"], ["y"])])
    assert operators == ["Relu"] and counts["transpose"] == 2


def test_a_reshape_after_a_reshape_is_one():
    node, constant = onnx.helper.make_node, onnx.numpy_helper.from_array
    extra = [
        node("Constant", [], ["wide"], value=constant(np.array([-1, 2, 3], dtype=np.int64))),
        node("Constant", [], ["flat"], value=constant(np.array([-1, SIZE], dtype=np.int64))),
    ]
    nodes = [node("Reshape", ["x", "wide"], ["a"]), node("Reshape", ["a", "flat"], ["b"]), node("Relu", ["b"], ["y"])]
    operators, counts = _chain(nodes, extra)
    assert operators.count("Reshape") <= 1 and counts["reshape"] >= 1
