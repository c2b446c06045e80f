"""Outlier channels moved into the weights: the function stays the same, and int8 keeps its levels."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest

from compiler.errors import ModelRefused
from compiler.precision import CalibrationOptions, convert
from compiler.precision.accuracy import agreement
from compiler.precision.graph import prepare
from compiler.precision.observe import run_outputs
from compiler.precision.smoothing import collect_channels, find_smoothing
from tests.compiler.test_precision_half import graph

RNG = np.random.default_rng(0)
WEIGHT = RNG.standard_normal((16, 8)).astype(np.float32)


def outliers(rows: int = 64, size: float = 60.0) -> np.ndarray:
    """Values around 1, but for channel 3, as a transformer has them."""
    x = RNG.standard_normal((rows, 16)).astype(np.float32)
    x[:, 3] *= size
    return x


def product(text: str = "(float[N,16] x) => (float[N,8] y) { y = MatMul(x, w) }", **constants: np.ndarray) -> ir.Model:
    return graph(text, w=WEIGHT, **constants)


def small_channel(weight: np.ndarray) -> np.ndarray:
    """The answer is in the other channels: the large one has a small weight."""
    weight = weight.copy()
    weight[3] /= 60
    return weight


@pytest.mark.parametrize("target", ["onnxruntime", "openvino", "tensorrt"])
def test_an_outlier_channel_no_longer_costs_the_others_their_levels(target):
    model = graph("(float[N,16] x) => (float[N,8] y) { y = MatMul(x, w) }", w=small_channel(WEIGHT))
    samples = [{"x": outliers()}]
    result = convert(model, "int8", target, samples)
    assert result.counts["smoothed_tensors"] == 1 and result.agreement > 0.9995
    assert any(n.startswith("outlier channels of 1 tensor(s) are moved into the weights") for n in result.notes)
    onnx.checker.check_model(ir.to_proto(result.model), full_check=True)
    options = CalibrationOptions(method="percentile", percentile=100)
    with pytest.raises(ModelRefused, match=r"agreement with fp32 is 0\.[5-8]"):
        convert(model, "int8", target, samples, calibration=options)


def test_the_factors_cancel():
    model = prepare(product())
    [node] = model.graph
    [found] = find_smoothing(model, [node.name], [{"x": outliers()}], 8).values()
    x = outliers()
    assert found.factors[3] > 10 * np.delete(found.factors, 3).max()
    assert np.allclose((x / found.factors) @ (WEIGHT * found.factors[:, None]), x @ WEIGHT, rtol=1e-4, atol=1e-4)
    assert np.exp(np.log(found.factors).mean()) == pytest.approx(1, rel=1e-5)
    assert found.low < 0 < found.high


def test_even_channels_are_left_alone():
    model = prepare(product(
        "(float[N,16] x) => (float[N,8] y) { y = MatMul(x, e) z = MatMul(x, w) }", e=np.ones((16, 8), np.float32)
    ))  # fmt: skip
    x = RNG.uniform(-1, 1, (64, 16)).astype(np.float32)
    assert find_smoothing(model, [model.graph[0].name], [{"x": x}], 8) == {}


def test_one_product_serves_all_readers_and_a_held_one_reads_the_plain_values():
    text = (
        "(float[N,16] x) => (float[N,8] y) { a = MatMul(x, w) b = Gemm<transB=1>(x, t, c)"
        " d = MatMul(x, bad) s = Add(a, b) y = Add(s, d) }"
    )
    bad = np.zeros((16, 8), np.float32)
    bad[3] = 1000  # what it gives drowns the others, unless it is exact
    model = product(text, t=WEIGHT.T.copy(), c=np.ones(8, np.float32), bad=bad)
    samples = [{"x": outliers()}]
    result = convert(model, "int8", "onnxruntime", samples, calibration=CalibrationOptions(min_cosine=0.999999))
    muls = [n for n in result.model.graph if n.op_type == "Mul"]
    held = {h.name for h in result.held}
    assert len(muls) == 1 and len(held) == 1
    [kept] = [n for n in result.model.graph if n.name in held]
    assert kept.inputs[0].name == "x"


def test_channels_are_those_of_all_samples_and_nan_is_left_out():
    model = prepare(product())
    parts = [{"x": p} for p in np.array_split(outliers(), 5)]
    whole = {"x": np.concatenate([p["x"] for p in parts])}
    [one], [other] = (collect_channels(model, ["x"], s).values() for s in (parts, [whole]))
    for attribute in ("low", "high", "mean_square"):
        assert np.allclose(getattr(one, attribute), getattr(other, attribute), rtol=1e-12)
    assert collect_channels(model, ["x"], [{"x": np.full((2, 16), np.nan, np.float32)}]) == {}


def test_dead_channels_and_unread_ones_do_no_harm():
    x, weight = outliers(), small_channel(WEIGHT)
    x[:, 5], x[:, 7], weight[7] = 0, 1000 * x[:, 7], 0
    model = graph("(float[N,16] x) => (float[N,8] y) { y = MatMul(x, w) }", w=weight)
    prepared = prepare(model)
    [found] = find_smoothing(prepared, [prepared.graph[0].name], [{"x": x}], 8).values()
    assert found.factors[5] == 1 and np.isfinite(found.factors).all()
    # Nothing reads channel 7: it may be made as small as any.
    assert np.abs(x[:, 7] / found.factors[7]).max() <= 1.001 * np.abs(x / found.factors).max()
    result = convert(model, "int8", "onnxruntime", [{"x": x}])
    assert agreement(run_outputs(model, [{"x": x}]), run_outputs(result.model, [{"x": x}])) > 0.999


def test_dynamic_int8_is_smoothed_too_and_still_fused_by_onnxruntime(tmp_path):
    model = graph("(float[N,16] x) => (float[N,8] y) { y = MatMul(x, w) }", w=small_channel(WEIGHT))
    result = convert(model, "int8_dynamic", "onnxruntime", [{"x": outliers()}])
    assert result.agreement > 0.9995 and any("outlier channels of 1 tensor(s)" in n for n in result.notes)
    fused = tmp_path / "fused.onnx"
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(fused)
    session = onnxruntime.InferenceSession(ir.to_proto(result.model).SerializeToString(), options)
    assert [n.op_type for n in onnx.load(str(fused)).graph.node] == ["Mul", "DynamicQuantizeMatMul"]
    x = outliers()
    assert agreement(run_outputs(model, [{"x": x}]), [{"y": session.run(None, {"x": x})[0]}]) > 0.999


@pytest.mark.parametrize("precision", ["int8", "int8_dynamic", "fp16"])
def test_edges_widen_the_ranges_and_are_judged(precision):
    """Calibration data between -1 and 1, and a spec that allows 8: both must be answered rightly."""
    model = graph("(float[N,16] x) => (float[N,8] y) { y = MatMul(x, w) }", w=WEIGHT)
    inner = [{"x": RNG.uniform(-1, 1, (16, 16)).astype(np.float32)}]
    edge = {"x": np.full((1, 16), 8, np.float32) * np.sign(RNG.standard_normal(16)).astype(np.float32)}
    result = convert(
        model, precision, "onnxruntime", inner, edges=[edge], calibration=CalibrationOptions(min_cosine=0.9)
    )
    assert agreement(run_outputs(model, [edge]), run_outputs(result.model, [edge])) > 0.99
    if precision == "int8":
        # One range for both leaves the inner ones few levels: that is told by the agreement, which is the worst of all.
        assert result.agreement == pytest.approx(
            min(agreement(run_outputs(model, [s]), run_outputs(result.model, [s])) for s in (*inner, edge))
        )
