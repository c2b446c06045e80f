"""fp16 and bf16 in the graph: ranges, epsilons, masks, schemas. Each node's result is rounded, as engines do."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compiler.errors import ModelRefused, UsageError
from compiler.precision import CalibrationOptions, convert, supported
from compiler.precision.emulate import emulated
from compiler.precision.graph import prepare
from compiler.precision.holds import FP16, static_holds
from compiler.precision.observe import run_outputs


def graph(text: str, opset: int = 20, **constants: object) -> ir.Model:
    """Parses `float[N] x => float[N] y` and a body; constants become initializers."""
    io, body = text.split("{", 1)
    proto = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": {opset}]> g {io} {{{body}')
    for name, value in constants.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(value), name))
    return ir.from_proto(onnx.shape_inference.infer_shapes(proto))


def half(model: ir.Model, precision: str = "fp16", target: str = "tensorrt", **inputs: np.ndarray):
    """Converts and returns (result, outputs as an engine would give them); the graph must be valid."""
    result = convert(model, precision, target, [inputs])
    onnx.checker.check_model(ir.to_proto(result.model), full_check=True)
    assert [v.dtype for v in result.model.graph.outputs] == [v.dtype for v in model.graph.outputs]
    assert [v.dtype for v in result.model.graph.inputs] == [v.dtype for v in model.graph.inputs]
    [outputs] = run_outputs(emulated(result.model), [inputs])
    return result, outputs


def reason(result, op_type: str) -> str:
    return next(h.reason for h in result.held if h.op_type == op_type)


def f32(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def test_b02_an_epsilon_that_is_zero_in_fp16_holds_its_layer_norm():
    model = graph(
        "(float[N,4] x) => (float[N,4] y) { a = Mul(x, one) y = LayerNormalization<epsilon=1.0e-12>(a, s, b) }",
        one=np.float32(1),
        s=np.ones(4, np.float32),
        b=np.zeros(4, np.float32),
    )
    result, got = half(model, x=np.full((2, 4), 3, np.float32))
    assert (got["y"] == 0).all()
    assert "epsilon 1e-12 is 0 in fp16" in reason(result, "LayerNormalization")
    # 1e-5 is representable: nothing is held.
    other = graph(
        "(float[N,4] x) => (float[N,4] y) { y = LayerNormalization<epsilon=1.0e-5>(x, s, b) }",
        s=np.ones(4, np.float32),
        b=np.zeros(4, np.float32),
    )
    assert half(other, x=np.full((2, 4), 3, np.float32))[0].held == ()


def test_b02_an_added_epsilon_is_held_up_to_the_division_it_protects():
    model = graph(
        "(float[N] x) => (float[N] y) { a = Abs(x) b = Add(a, eps) c = Sqrt(b) d = Div(x, c) y = Mul(d, two) }",
        eps=np.float32(1e-12),
        two=np.float32(2),
    )
    result, got = half(model, x=f32(0, 4))
    assert got["y"].tolist() == [0, 4]
    assert {h.op_type for h in result.held} == {"Add", "Sqrt", "Div"}


@pytest.mark.parametrize("sentinel", [-1e9, -3.4028234663852886e38, -65504.0])
def test_b03_b04_a_fully_masked_row_stays_finite(sentinel):
    """The answer is the fp32 graph's own: uniform where the scores drown in the mask, never NaN."""
    model = graph(
        "(float[N,4] s, float[N,4] m) => (float[N,4] y)"
        "{ a = Mul(s, one) k = Sub(one, m) p = Mul(k, c) z = Add(a, p) w = Softmax(z) y = Mul(w, one) }",
        one=np.float32(1),
        c=np.float32(sentinel),
    )
    scores = np.full((2, 4), -20, np.float32)
    mask = np.array([[0, 0, 0, 0], [1, 1, 0, 0]], np.float32)
    result, got = half(model, s=scores, m=mask)
    assert np.allclose(got["y"], [[0.25] * 4, [0.5, 0.5, 0, 0]])
    assert {h.op_type for h in result.held} == {"Mul", "Add", "Softmax"}
    assert "does not fit fp16" in reason(result, "Softmax")
    # Also where no sample is padded: the danger is in the constant.
    unpadded, _ = half(model, s=scores, m=np.ones_like(mask))
    assert {h.op_type for h in unpadded.held} == {"Mul", "Add", "Softmax"}


def test_b04_a_mask_given_as_an_input_is_judged_by_its_values():
    model = graph("(float[N,2] s, float[N,2] m) => (float[N,2] y) { z = Add(s, m) w = Softmax(z) y = Relu(w) }")
    result, got = half(model, s=np.full((1, 2), -20, np.float32), m=np.full((1, 2), -65504, np.float32))
    assert got["y"].tolist() == [[0.5, 0.5]]
    assert "65524" in reason(result, "Add")


def test_b05_a_constant_of_30000_stays_exact_and_half():
    model = graph("(float[N] x) => (float[N] y) { y = Mul(x, c) }", c=np.float32(30000))
    result, got = half(model, x=f32(1, 0.5))
    assert got["y"].tolist() == [30000, 15000]
    assert result.held == ()
    [constant] = result.model.graph.initializers.values()
    assert constant.dtype == ir.DataType.FLOAT16 and float(constant.const_value.numpy()) == 30000.0


def test_b05_a_constant_over_65504_stays_in_fp32_and_is_reported():
    model = graph(
        "(float[N] x) => (float[N] y) { a = Mul(x, c) b = Mul(a, d) y = Relu(b) }",
        c=np.float32(1e6),
        d=np.float32(1e-6),
    )
    result, got = half(model, x=f32(1, 2))
    assert np.allclose(got["y"], [1, 2])
    assert "the constant 1e+06" in reason(result, "Mul")


@pytest.mark.parametrize("opset", [10, 18])
def test_b08_what_may_be_half_is_read_from_the_schemas_of_the_opset(opset):
    scales = "Resize(a, sc)" if opset == 10 else "Resize(a, , sc)"
    model = graph(
        f"(float[1,1,4,4] x) => (float[1,1,8,8] y, float[1,1,8,2] t, int64[1,1,8,2] i)"
        f"{{ a = Mul(x, one) y = {scales} t, i = TopK(y, k) }}",
        opset,
        one=np.float32(1),
        sc=f32(1, 1, 2, 2),
        k=np.array([2], np.int64),
    )
    x = np.arange(16, dtype=np.float32).reshape(1, 1, 4, 4)
    result, got = half(model, x=x)
    [want] = run_outputs(model, [{"x": x}])
    assert all(np.array_equal(got[n], want[n]) for n in want)
    [resize] = [n for n in result.model.graph if n.op_type == "Resize"]
    # The data is half, the scales are float32 by the schema of either opset.
    assert resize.inputs[0].dtype == ir.DataType.FLOAT16
    assert resize.inputs[1 if opset == 10 else 2].dtype == ir.DataType.FLOAT


def test_b08_range_nonzero_and_cumsum():
    model = graph(
        "(float[N] x, float n) => (float[M] r, int64[1,K] z, float[N] c)"
        "{ r0 = Range(zero, n, one) r = Mul(r0, one) a = Mul(x, one) z = NonZero(a) c = CumSum(a, axis) }",
        zero=np.float32(0),
        one=np.float32(1),
        axis=np.int64(0),
    )
    result, got = half(model, x=f32(1, 0, 2), n=np.array(5, np.float32))
    assert got["r"].tolist() == [0, 1, 2, 3, 4] and got["z"].tolist() == [[0, 2]] and got["c"].tolist() == [1, 1, 3]
    assert "its schema at opset 20 has no float16" in reason(result, "Range")
    # A sum that leaves the range is held, though each value fits.
    long, _ = half(model, x=np.full(4096, 20, np.float32), n=np.array(5, np.float32))
    assert "81920" in reason(long, "CumSum")


def test_sizes_computed_in_floats_stay_exact():
    model = graph(
        "(float[N] x, int64 n) => (int64 y, float[N] z)"
        "{ f = Cast<to=1>(n) h = Add(f, one) y = Cast<to=7>(h) z = Mul(x, one) }",
        one=np.float32(1),
    )
    result, got = half(model, x=f32(1), n=np.array(4096, np.int64))
    assert got["y"] == 4097
    assert "integers" in reason(result, "Add")


def test_b09_the_graph_is_sorted_valid_and_keeps_its_types():
    model = graph("(float[N] x) => (float[N] y, float[N] z) { y = Relu(x) z = Exp(y) }")
    result = convert(model, "fp16", "onnxruntime", [{"x": f32(-1, 1)}])
    proto = ir.to_proto(result.model)
    onnx.checker.check_model(proto, full_check=True)
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    assert [t.type for t in (*session.get_inputs(), *session.get_outputs())] == ["tensor(float)"] * 3
    y, z = session.run(["y", "z"], {"x": f32(-1, 1)})
    assert y.tolist() == [0, 1] and np.allclose(z, [1, np.e], rtol=1e-3)
    # b11: said before anything is relied on.
    assert any("slower than fp32" in note for note in result.notes)
    assert model.graph.node(0).outputs[0].dtype == ir.DataType.FLOAT, "the given graph is not changed"


def test_b11_fp16_on_onnxruntime_carries_the_warning_and_tensorrt_does_not():
    model = graph("(float[N] x) => (float[N] y) { y = Relu(x) }")
    assert any("slower" in n for n in convert(model, "fp16", "onnxruntime", [{"x": f32(1)}]).notes)
    assert not any("slower" in n for n in convert(model, "fp16", "tensorrt", [{"x": f32(1)}]).notes)


def test_b12_bf16_is_refused_on_onnxruntime_before_any_work():
    with pytest.raises(ModelRefused) as error:
        convert(graph("(float[N] x) => (float[N] y) { y = Relu(x) }"), "bf16", "onnxruntime", [])
    assert "no bfloat16 kernels" in str(error.value) and "int8" in error.value.hint
    assert "bf16" not in supported("onnxruntime") and "bf16" in supported("tensorrt")


def test_b13_a_mean_whose_sum_overflows_is_held():
    model = graph(
        "(float[1,4096] x) => (float[1,1] y) { a = Mul(x, one) y = ReduceMean(a, axes) }",
        one=np.float32(1),
        axes=np.array([1], np.int64),
    )
    result, got = half(model, x=np.full((1, 4096), 20, np.float32))
    assert got["y"].tolist() == [[20.0]]
    assert "its sums reach 81920, fp16 ends at 65504" in reason(result, "ReduceMean")


def test_b14_a_product_out_of_range_is_held_in_fp16_and_half_in_bf16():
    model = graph(
        "(float[1,2048] x) => (float[1,1] y) { a = Relu(x) y = MatMul(a, w) }", w=np.full((2048, 1), 6, np.float32)
    )
    x = np.full((1, 2048), 6, np.float32)
    result, got = half(model, x=x)
    assert got["y"].tolist() == [[73728.0]]
    assert "73728" in reason(result, "MatMul")
    result, got = half(model, "bf16", x=x)
    assert result.held == () and got["y"].tolist() == [[73728.0]]


def test_the_emulation_shows_an_overflow_that_onnxruntime_hides():
    """The judge itself is shown to fail on a wrong graph."""
    from compiler.precision.casts import insert_casts

    model = prepare(
        graph(
            "(float[1,2048] x) => (float[1,1] y) { a = MatMul(x, w) y = Mul(a, c) }",
            w=np.full((2048, 1), 6, np.float32),
            c=np.float32(0.5),
        )
    )
    insert_casts(model, FP16, frozenset())
    [got] = run_outputs(emulated(model), [{"x": np.full((1, 2048), 6, np.float32)}])
    assert np.isinf(got["y"]).all()


def test_a_subgraph_is_held_and_reads_what_it_captures_in_fp32():
    model = graph(
        "(float[N] x, bool c) => (float[N] y)"
        "{ a = Mul(x, two) b = If(c) <then_branch = t () => (float[N] p) { p = Add(a, a) },"
        " else_branch = e () => (float[N] q) { q = Sub(a, a) }> y = Mul(b, two) }",
        two=np.float32(2),
    )
    result, got = half(model, x=f32(1, 2), c=np.array(True))
    assert got["y"].tolist() == [8, 16]
    assert reason(result, "If") == "it holds a subgraph"


def test_accuracy_that_half_cannot_give_is_held_or_refused_with_the_numbers():
    """(x + 1000) - 1000 loses x in fp16; the search holds the two nodes, and proves that neither can be released."""
    model = graph(
        "(float[N] x) => (float[N] y) { a = Add(x, c) b = Sub(a, c) y = Mul(b, d) }",
        c=np.float32(1000),
        d=np.float32(2),
    )
    x = np.linspace(0.01, 0.2, 16).astype(np.float32)
    result, got = half(model, x=x)
    assert [h.op_type for h in result.held] == ["Add", "Sub"] and "costs accuracy" in result.held[0].reason
    assert any("each was tried released" in note for note in result.notes)
    # Three elementwise nodes of equal size: each does a third of the work.
    assert [round(h.share.flops, 3) for h in result.held] == [0.333, 0.333]
    assert np.allclose(got["y"], 2 * x, atol=1e-3)
    with pytest.raises(ModelRefused, match=r"0\.9999 is asked"):
        convert(model, "fp16", "tensorrt", [{"x": x}], calibration=CalibrationOptions(max_runs=1))


def test_b20_a_graph_that_would_stay_in_fp32_is_refused_and_not_called_fp16():
    model = graph("(float[N] x) => (float[N] y) { a = Add(x, c) y = Sub(a, c) }", c=np.float32(1000))
    with pytest.raises(ModelRefused, match="agreement with fp32 is"):
        convert(model, "fp16", "tensorrt", [{"x": np.linspace(0.01, 0.2, 16).astype(np.float32)}])
    overflow = graph("(float[N] x) => (float[N] y) { y = Mul(x, c) }", c=np.float32(1e6))
    with pytest.raises(ModelRefused, match=r"no node of the graph can be fp16: Mul '.*': the constant 1e\+06"):
        convert(overflow, "fp16", "tensorrt", [{"x": f32(1)}])


@pytest.mark.parametrize(("scale", "is_held"), [(1e4, True), (1.0, False)])
def test_a_layer_norm_on_large_rows_is_held_for_its_squares(scale, is_held):
    """Rows of 1e4 fit fp16, their squares of 1e8 do not; an epsilon of 1e-12 alone is no reason."""
    model = graph(
        "(float[N,4] x) => (float[N,4] y)"
        "{ a = Mul(x, one) n = LayerNormalization<epsilon=1.0e-12>(a, s) y = Mul(n, one) }",
        one=np.float32(1), s=np.ones(4, np.float32),
    )  # fmt: skip
    x = np.array([[1, -1, 2, -2], [0.5, 1, 1.5, 2]], np.float32) * np.float32(scale)
    result, got = half(model, x=x)
    [want] = run_outputs(model, [{"x": x}])
    assert np.allclose(got["y"], want["y"], atol=2e-3)
    assert [h.op_type for h in result.held] == (["LayerNormalization"] if is_held else [])
    if is_held:
        assert "its sums reach 1e+09, fp16 ends at 65504" in reason(result, "LayerNormalization")


def test_unknown_names_are_refused():
    model = graph("(float[N] x) => (float[N] y) { y = Relu(x) }")
    with pytest.raises(UsageError, match=r"fp61.*did you mean 'fp16'"):
        convert(model, "fp61", "tensorrt", [{"x": f32(1)}])
    with pytest.raises(UsageError, match="tensort"):
        supported("tensort")
    with pytest.raises(UsageError, match="needs samples"):
        convert(model, "fp16", "tensorrt", [])
    with pytest.raises(UsageError, match="lacks 'x'"):
        convert(model, "fp16", "tensorrt", [{"z": f32(1)}])


_UNARY = ("Relu", "Tanh", "Sigmoid", "Neg", "Abs", "Softmax", "Identity")
_BINARY = ("Add", "Sub", "Mul", "Max", "Min")


@st.composite
def random_graphs(draw: st.DrawFn) -> ir.Model:
    """A few nodes over [N, 8], with constants of all magnitudes, products and reductions."""
    values, body = ["x"], []
    constants: dict[str, np.ndarray] = {}
    rng = np.random.default_rng(draw(st.integers(0, 2**16)))
    for index in range(draw(st.integers(1, 7))):
        left, out = draw(st.sampled_from(values)), f"v{index}"
        kind = draw(st.sampled_from(("unary", "binary", "constant", "matmul", "norm", "mean")))
        if kind == "unary":
            body.append(f"{out} = {draw(st.sampled_from(_UNARY))}({left})")
        elif kind == "binary":
            body.append(f"{out} = {draw(st.sampled_from(_BINARY))}({left}, {draw(st.sampled_from(values))})")
        elif kind == "constant":
            constants[f"c{index}"] = np.float32(draw(st.sampled_from([1e-12, 1e-3, 0.5, 3.0, 300.0, 30000.0, 1e6])))
            body.append(f"{out} = {draw(st.sampled_from(('Add', 'Mul')))}({left}, c{index})")
        elif kind == "matmul":
            constants[f"c{index}"] = rng.standard_normal((8, 8)).astype(np.float32)
            body.append(f"{out} = MatMul({left}, c{index})")
        elif kind == "norm":
            constants[f"c{index}"] = np.ones(8, np.float32)
            body.append(
                f"{out} = LayerNormalization<epsilon={draw(st.sampled_from(('1.0e-12', '1.0e-5')))}>({left}, c{index})"
            )
        else:
            constants[f"c{index}"] = np.array([1], np.int64)
            body.append(f"m{index} = ReduceMean({left}, c{index}) {out} = Add({left}, m{index})")
        values.append(out)
    text = f"(float[N,8] x) => (float[N,8] {values[-1]}) {{ {' '.join(body)} }}"
    return graph(text, **constants)


@settings(max_examples=40, deadline=None)
@given(model=random_graphs(), precision=st.sampled_from(("fp16", "bf16")), seed=st.integers(0, 99))
def test_random_graphs_stay_valid_and_within_tolerance_or_are_refused(model, precision, seed):
    x = np.random.default_rng(seed).standard_normal((3, 8)).astype(np.float32)
    [want] = run_outputs(model, [{"x": x}])
    try:
        _, got = half(model, precision, x=x)
    except ModelRefused as error:
        assert "agreement with fp32" in error.message or "no node of the graph can be" in error.message
        return
    [(name, expected)] = want.items()
    assert np.isfinite(got[name][np.isfinite(expected)]).all()
    norm = float(np.linalg.norm(expected.astype(np.float64)))
    distance = float(np.linalg.norm(got[name].astype(np.float64) - expected))
    # 1 - d^2 / 2 >= the precision's threshold.
    allowed = {"fp16": 0.0142, "bf16": 0.0448}[precision]
    assert distance <= allowed * norm + 1e-6 or norm == 0


def test_static_holds_name_no_node_of_a_harmless_graph():
    assert static_holds(prepare(graph("(float[N] x) => (float[N] y) { y = Tanh(x) }")), FP16) == {}
