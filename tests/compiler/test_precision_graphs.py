"""Every precision on the kinds of graph that converters get wrong: each gives a valid, near graph or a refusal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compiler.errors import ModelRefused
from compiler.precision import PrecisionResult, convert
from compiler.precision.accuracy import agreement
from compiler.precision.emulate import emulated
from compiler.precision.observe import run_outputs
from tests.compiler.test_precision_half import graph, random_graphs

RNG = np.random.default_rng(0)


def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
    return (RNG.standard_normal(shape) * scale).astype(np.float32)


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


@dataclass(frozen=True)
class Graph:
    """A graph, what it is run on, and by precision the words of the refusal that is right."""

    text: str
    inputs: Mapping[str, np.ndarray]
    constants: Mapping[str, np.ndarray] = field(default_factory=dict)
    opset: int = 20
    refused: Mapping[str, str] = field(default_factory=dict)

    def model(self) -> ir.Model:
        return graph(self.text, self.opset, **self.constants)


NO_WEIGHT = "no node of the graph can be int8"
NO_INT8 = {"int8": NO_WEIGHT, "int8_dynamic": NO_WEIGHT}
OLD = {
    **dict.fromkeys(("int8", "int8_dynamic"), "the graph is opset 10, scales per channel need 13"),
    "bf16": "its schema at opset 10 has no bfloat16",
}
# ONNX gave convolutions bfloat16 with opset 22.
NO_BF16 = {"bf16": "its schema at opset 20 has no bfloat16"}
NO_MATMUL = {"int8_dynamic": NO_WEIGHT}
_X = {"x": normal(3, 8)}
_MLP = "(float[N,8] x) => (float[N,4] y) { a = MatMul(x, w) r = Relu(a) y = MatMul(r, v) }"
_WEIGHTS = {"w": normal(8, 8), "v": normal(8, 4)}

GRAPHS = {
    "opset_10": Graph(_MLP, _X, _WEIGHTS, 10, OLD),
    "opset_13": Graph(_MLP, _X, _WEIGHTS, 13),
    "opset_18": Graph(_MLP, _X, _WEIGHTS, 18),
    "opset_21": Graph(_MLP, _X, _WEIGHTS, 21),
    "gemm_transposed": Graph(
        "(float[N,8] x) => (float[N,4] y) { y = Gemm<transB=1>(x, w, b) }", _X, {"w": normal(4, 8), "b": normal(4)}
    ),
    "gemm_transposed_data": Graph(
        "(float[8,N] x) => (float[N,4] y) { y = Gemm<transA=1>(x, w) }", {"x": normal(8, 3)}, {"w": normal(8, 4)},
        refused=NO_INT8,
    ),
    "gemm_scaled": Graph(
        "(float[N,8] x) => (float[N,4] y) { y = Gemm<alpha=0.5>(x, w) }", _X, {"w": normal(8, 4)}, refused=NO_INT8
    ),
    "gemm_with_a_row_of_bias": Graph(
        "(float[N,8] x) => (float[N,4] y) { y = Gemm(x, w, b) }", _X, {"w": normal(8, 4), "b": normal(1, 4)}
    ),
    "both_operands_given": Graph(
        "(float[N,8] x, float[8,4] z) => (float[N,4] y) { y = MatMul(x, z) }", {**_X, "z": normal(8, 4)},
        refused=NO_INT8,
    ),
    "batched_weight": Graph(
        "(float[2,N,8] x) => (float[2,N,4] y) { y = MatMul(x, w) }", {"x": normal(2, 3, 8)}, {"w": normal(2, 8, 4)},
        refused=NO_INT8,
    ),
    "conv_1d": Graph(
        "(float[N,3,9] x) => (float[N,4,7] y) { y = Conv(x, w, b) }", {"x": normal(2, 3, 9)},
        {"w": normal(4, 3, 3), "b": normal(4)}, refused={**NO_BF16, **NO_MATMUL},
    ),
    "conv_3d": Graph(
        "(float[N,2,5,5,5] x) => (float[N,3,3,3,3] y) { y = Conv(x, w) }", {"x": normal(2, 2, 5, 5, 5)},
        {"w": normal(3, 2, 3, 3, 3)}, refused={**NO_BF16, **NO_MATMUL},
    ),
    "conv_of_groups": Graph(
        "(float[N,4,6,6] x) => (float[N,6,4,4] y) { y = Conv<group=2>(x, w, b) }", {"x": normal(2, 4, 6, 6)},
        {"w": normal(6, 2, 3, 3), "b": normal(6)}, refused={**NO_BF16, **NO_MATMUL},
    ),
    "conv_transposed": Graph(
        "(float[N,3,5,5] x) => (float[N,4,7,7] y) { y = ConvTranspose(x, w) }", {"x": normal(2, 3, 5, 5)},
        {"w": normal(3, 4, 3, 3)}, refused={**NO_BF16, **NO_INT8},
    ),
    "if_body": Graph(
        "(float[N,8] x, bool c) => (float[N,4] y) { a = MatMul(x, w)"
        " b = If(c) <then_branch = t () => (float[N,8] p) { p = Add(a, a) },"
        " else_branch = e () => (float[N,8] q) { q = MatMul(a, w) }> y = MatMul(b, v) }",
        {**_X, "c": np.array(True)}, _WEIGHTS,
    ),
    "loop_body": Graph(
        "(float[N,8] x) => (float[N,4] y) { a = MatMul(x, w)"
        " b = Loop(n, , a) <body = l (int64 i, bool k, float[N,8] s) => (bool ko, float[N,8] so)"
        " { ko = Identity(k) so = Add(s, a) }> y = MatMul(b, v) }",
        _X, {**_WEIGHTS, "n": np.array(3, np.int64)},
    ),
    "an_input_that_is_an_output": Graph(
        "(float[N,8] x) => (float[N,8] x, float[N,4] y) { a = MatMul(x, w) y = MatMul(a, v) }", _X, _WEIGHTS
    ),
    "a_weight_that_is_an_output": Graph(
        "(float[N,8] x) => (float[N,4] y, float[8,4] v) { a = MatMul(x, w) y = MatMul(a, v) }", _X, _WEIGHTS
    ),
    "an_inner_value_that_is_an_output": Graph(
        "(float[N,8] x) => (float[N,8] a, float[N,4] y) { a = MatMul(x, w) y = MatMul(a, v) }", _X, _WEIGHTS
    ),
    "a_weight_with_two_readers": Graph(
        "(float[N,8] x) => (float[N,8] y) { a = MatMul(x, w) b = MatMul(a, w) y = Add(b, a) }", _X, {"w": normal(8, 8)}
    ),
    "a_weight_read_elementwise_too": Graph(
        "(float[8,8] x) => (float[8,8] y) { a = MatMul(x, w) y = Add(a, w) }", {"x": normal(8, 8)}, {"w": normal(8, 8)}
    ),
    "an_empty_batch": Graph(_MLP, {"x": normal(0, 8)}, _WEIGHTS, refused={"int8": "has no calibration data"}),
    "an_empty_branch": Graph(
        "(float[N,8] x) => (float[N,4] y) { e = Slice(x, zero, zero, zero) f = Concat<axis=0>(e, x) y = MatMul(f, v) }",
        _X, {"v": normal(8, 4), "zero": ints(0)},
    ),
    "an_empty_weight": Graph(
        "(float[N,8] x) => (float[N,4] y) { e = MatMul(x, w) s = ReduceSum<keepdims=1>(e, one) a = MatMul(x, v)"
        " y = Add(a, s) }",
        _X, {"w": normal(8, 0), "v": normal(8, 4), "one": ints(1)},
    ),
    "no_float": Graph(
        "(int64[N] x) => (int64[N] y) { y = Add(x, one) }", {"x": ints(1, 2)}, {"one": ints(1)},
        refused={**NO_INT8, "fp16": "none is float32", "bf16": "none is float32"},
    ),
    "float64": Graph(
        "(double[N,8] x) => (double[N,4] y) { y = MatMul(x, w) }", {"x": normal(3, 8).astype(np.float64)},
        {"w": normal(8, 4).astype(np.float64)},
        refused={**NO_INT8, "fp16": "its values are double, none", "bf16": "its values are double, none"},
    ),
    "float64_inside": Graph(
        "(float[N,8] x) => (float[N,4] y) { a = MatMul(x, w) d = Cast<to=11>(a) e = Mul(d, d) s = Cast<to=1>(e)"
        " y = MatMul(s, v) }",
        _X, _WEIGHTS,
    ),
    "float16_already": Graph(
        "(float16[N,8] x) => (float16[N,4] y) { y = MatMul(x, w) }", {"x": normal(3, 8).astype(np.float16)},
        {"w": normal(8, 4).astype(np.float16)},
        refused={**NO_INT8, "fp16": "its values are float16, none", "bf16": "its values are float16, none"},
    ),
    "float16_input": Graph(
        "(float16[N,8] x) => (float[N,4] y) { a = Cast<to=1>(x) b = MatMul(a, w) y = MatMul(b, v) }",
        {"x": normal(3, 8).astype(np.float16)}, _WEIGHTS,
    ),
    "resize_scales": Graph(
        "(float[1,2,4,4] x) => (float[1,3,6,6] y) { r = Resize(x, , s) y = Conv(r, w) }", {"x": normal(1, 2, 4, 4)},
        {"s": np.array([1, 1, 2, 2], np.float32), "w": normal(3, 2, 3, 3)}, refused=NO_MATMUL,
    ),
    "top_k_and_nonzero": Graph(
        "(float[N,8] x) => (float[N,2] t, int64[N,2] i, int64[2,K] z)"
        "{ a = MatMul(x, w) t, i = TopK(a, k) b = Relu(a) g = Greater(b, one) z = NonZero(g) }",
        {"x": np.eye(8, dtype=np.float32)},
        {"w": np.arange(64, dtype=np.float32).reshape(8, 8) / 64, "k": ints(2), "one": np.float32(0.4)},
    ),
    "layer_norm_on_large_rows": Graph(
        "(float[N,8] x) => (float[N,4] y) { l = Mul(x, big) n = LayerNormalization<epsilon=1.0e-12>(l, s)"
        " y = MatMul(n, v) }",
        _X, {"big": np.float32(1e4), "s": np.ones(8, np.float32), "v": normal(8, 4)},
    ),
    "mean_of_many": Graph(
        "(float[N,4096] x) => (float[N,4] y) { m = ReduceMean(x, one) y = MatMul(m, w) }",
        {"x": np.full((2, 4096), 20, np.float32)}, {"one": ints(1), "w": normal(1, 4)},
    ),
    "lstm": Graph(
        "(float[S,N,8] x) => (float[S,1,N,4] y) { y = LSTM<hidden_size=4>(x, w, r) }", {"x": normal(3, 2, 8)},
        {"w": normal(1, 16, 8, scale=0.3), "r": normal(1, 16, 4, scale=0.3)}, refused={**NO_BF16, **NO_INT8},
    ),
    "dropout_and_optional_inputs": Graph(
        "(float[N,8] x) => (float[N,8] y) { a = MatMul(x, w) c = Clip(a, , top) y, m = Dropout(c) }", _X,
        {"w": normal(8, 8), "top": np.float32(3)},
    ),
}  # fmt: skip

PRECISIONS = (
    ("fp16", "tensorrt"),
    ("bf16", "tensorrt"),
    ("int8", "onnxruntime"),
    ("int8", "tensorrt"),
    ("int8_dynamic", "onnxruntime"),
)
MINIMUM = {"fp16": 0.9999, "bf16": 0.999, "int8": 0.99, "int8_dynamic": 0.99}


def _check(result: PrecisionResult, model: ir.Model, inputs: Mapping[str, np.ndarray], precision: str) -> None:
    proto = ir.to_proto(result.model)
    onnx.checker.check_model(proto, full_check=True)
    for side in ("inputs", "outputs"):
        before, after = getattr(model.graph, side), getattr(result.model.graph, side)
        assert [(v.name, v.dtype) for v in before] == [(v.name, v.dtype) for v in after]
    half = precision in ("fp16", "bf16")
    got = run_outputs(emulated(result.model) if half else result.model, [inputs])
    assert agreement(run_outputs(model, [inputs]), got) >= MINIMUM[precision]
    if precision != "bf16":
        onnxruntime.InferenceSession(proto.SerializeToString())  # with its own rewriting, as it will be served


@pytest.mark.parametrize(("precision", "target"), PRECISIONS, ids=lambda v: v)
@pytest.mark.parametrize("name", GRAPHS)
def test_the_graph_is_valid_and_near_or_refused_for_the_right_reason(name, precision, target):
    case = GRAPHS[name]
    model = case.model()
    if words := case.refused.get(precision):
        with pytest.raises(ModelRefused) as error:
            convert(model, precision, target, [case.inputs])
        assert words in error.value.message
        return
    _check(convert(model, precision, target, [case.inputs]), model, case.inputs, precision)


@settings(max_examples=60, deadline=None)
@given(model=random_graphs(), choice=st.sampled_from(PRECISIONS), seed=st.integers(0, 99))
def test_random_graphs_in_every_precision(model, choice, seed):
    """The converter may refuse with its numbers; what it returns is valid, finite and near."""
    precision, target = choice
    rng = np.random.default_rng(seed)
    inputs = {"x": rng.standard_normal((3, 8)).astype(np.float32)}
    try:
        result = convert(model, precision, target, [inputs])
    except ModelRefused as error:
        assert "agreement with fp32 is" in error.message or "no node of the graph can be" in error.message
        return
    held = {h.name for h in result.held}
    assert all(h.reason and 0 <= h.share.flops <= 1 for h in result.held) and len(held) == len(result.held)
    _check(result, model, inputs, precision)


@settings(max_examples=25, deadline=None)
@given(
    rank=st.integers(1, 3), groups=st.sampled_from([1, 2, 4]), kernel=st.integers(1, 3), residual=st.booleans(),
    choice=st.sampled_from([("int8", "onnxruntime"), ("int8", "tensorrt"), ("fp16", "tensorrt")]),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_random_convolutions(rank, groups, kernel, residual, choice, seed):
    """1-d to 3-d, plain, grouped and depthwise, with and without a sum after them, channels of very different size."""
    rng = np.random.default_rng(seed)
    size, pads = "4," * rank, ",".join(["0"] * rank + [str(kernel - 1)] * rank)
    weights = (rng.standard_normal((4, 4 // groups, *([kernel] * rank)))).astype(np.float32)
    weights *= (10.0 ** rng.integers(-2, 2, 4)).astype(np.float32).reshape(4, *([1] * (rank + 1)))
    body = f"c = Conv<group={groups}, pads=[{pads}]>(x, w, b) r = Relu(c) " + (
        "y = Add(r, x)" if residual else "y = Neg(r)"
    )
    model = graph(
        f"(float[N,4,{size[:-1]}] x) => (float[N,4,{size[:-1]}] y) {{ {body} }}",
        w=weights, b=rng.standard_normal(4).astype(np.float32),
    )  # fmt: skip
    inputs = {"x": rng.standard_normal((2, 4, *([4] * rank))).astype(np.float32)}
    try:
        result = convert(model, *choice, [inputs])
    except ModelRefused as error:
        assert "agreement with fp32 is" in error.message
        return
    _check(result, model, inputs, choice[0])
