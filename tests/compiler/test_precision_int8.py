"""int8 in the graph: scales, channels, outliers, what is held back; the fp32 graph is the oracle."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compiler.errors import ModelRefused, UsageError
from compiler.precision import CalibrationOptions, calibration_from_folder, convert, samples_from
from compiler.precision.accuracy import agreement
from compiler.precision.calibration import collect_ranges, range_notes
from compiler.precision.observe import run_outputs
from compiler.precision.support import cpu_flags, weight_bits
from compiler.precision.weights import quantized_weight
from tests.compiler.test_precision_half import f32, graph

# The whole range without smoothing, which would save what these tests want lost.
PLAIN = CalibrationOptions(method="percentile", percentile=100)


def _initializers(model: ir.Model) -> dict[str, np.ndarray]:
    return {n: v.const_value.numpy() for n, v in model.graph.initializers.items()}


def _ops(model: ir.Model) -> list[str]:
    return [n.op_type for n in model.graph]


def _convnet(rng: np.random.Generator) -> ir.Model:
    """A ResNet's shape in small: stem, pool, a block with a residual, global pool, classifier."""

    def w(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32)

    return graph(
        "(float[N,3,16,16] x) => (float[N,10] y) {"
        " s = Conv<pads=[1,1,1,1]>(x, w0, b0) r = Relu(s) p = MaxPool<kernel_shape=[2,2], strides=[2,2]>(r)"
        " a = Conv<pads=[1,1,1,1]>(p, w1, b1) ar = Relu(a) c = Conv<pads=[1,1,1,1]>(ar, w2, b2)"
        " d = Add(c, p) dr = Relu(d) g = GlobalAveragePool(dr) f = Flatten(g) y = Gemm<transB=1>(f, w3, b3) }",
        w0=w(8, 3, 3, 3), b0=w(8, 1).ravel(), w1=w(8, 8, 3, 3), b1=w(8, 1).ravel(),
        w2=w(8, 8, 3, 3), b2=w(8, 1).ravel(), w3=w(10, 8), b3=w(10, 1).ravel(),
    )  # fmt: skip


def _images(rng: np.random.Generator, count: int, batch: int = 2) -> list[dict[str, np.ndarray]]:
    return [{"x": rng.standard_normal((batch, 3, 16, 16)).astype(np.float32)} for _ in range(count)]


def test_a_convolution_net_runs_on_integer_kernels_from_stem_to_classifier():
    rng = np.random.default_rng(0)
    model, samples = _convnet(rng), _images(rng, 4)
    result = convert(model, "int8", "onnxruntime", samples)
    onnx.checker.check_model(ir.to_proto(result.model), full_check=True)
    assert result.held == () and result.counts["quantized_nodes"] == 4 and result.agreement > 0.999
    session = onnxruntime.InferenceSession(ir.to_proto(result.model).SerializeToString())
    got = [dict(zip(["y"], session.run(["y"], s), strict=True)) for s in samples]
    assert agreement(run_outputs(model, samples), got) > 0.999


def test_the_fused_graph_of_onnxruntime_has_no_float_convolution(tmp_path):
    rng = np.random.default_rng(0)
    result = convert(_convnet(rng), "int8", "onnxruntime", _images(rng, 2))
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(tmp_path / "fused.onnx")
    onnxruntime.InferenceSession(ir.to_proto(result.model).SerializeToString(), options)
    ops = [n.op_type for n in onnx.load(str(tmp_path / "fused.onnx")).graph.node]
    assert ops.count("QLinearConv") == 3 and "Conv" not in ops and "Relu" not in ops
    assert ops.count("QLinearAdd") == 1 and ops.count("QGemm") == 1


@pytest.mark.parametrize("target", ["tensorrt", "tensorrt-rtx"])
def test_tensorrt_gets_symmetric_int8_and_no_int32_bias(target):
    rng = np.random.default_rng(0)
    result = convert(_convnet(rng), "int8", target, _images(rng, 2))
    constants = _initializers(result.model)
    zero_points = [v for n, v in constants.items() if n.endswith("zero_point")]
    assert zero_points and all(z.dtype == np.int8 and not z.any() for z in zero_points)
    assert not any(v.dtype == np.int32 for v in constants.values())
    # Full 8-bit weights: its kernels do not saturate.
    assert max(np.abs(v).max() for n, v in constants.items() if n.endswith("_int8")) == 127
    assert result.agreement > 0.99


def test_b15_depthwise_channels_of_very_different_size_keep_their_steps():
    weights = np.concatenate([np.full((1, 1, 3, 3), 1.0), np.full((1, 1, 3, 3), 0.001)]).astype(np.float32)
    weights[:, 0, 0, 0] *= -1
    steps, scale = quantized_weight(weights, 0, 8)
    assert np.abs(steps[1]).max() == 127 and np.allclose(scale, [1 / 127, 0.001 / 127])
    # One scale for both would leave nothing of channel 1.
    assert not np.rint(weights[1] / (1 / 127)).any()
    model = graph("(float[N,2,8,8] x) => (float[N,2,6,6] y) { y = Conv<group=2>(x, w) }", w=weights)
    samples = [{"x": np.random.default_rng(0).uniform(0, 1, (2, 2, 8, 8)).astype(np.float32)}]
    result = convert(model, "int8", "tensorrt", samples)
    [want], [got] = run_outputs(model, samples), run_outputs(result.model, samples)
    for channel in range(2):
        one, other = want["y"][:, channel], got["y"][:, channel]
        assert np.linalg.norm(other - one) < 0.02 * np.linalg.norm(one)


def test_b15_accuracy_that_is_lost_stops_the_release():
    """One input channel is 1000 times the others, and the answer is in the others: one scale cannot hold both."""
    weights = np.concatenate([np.zeros((1, 8)), np.eye(8)]).astype(np.float32)
    model = graph("(float[N,9] x) => (float[N,8] y) { y = MatMul(x, w) }", w=weights)
    x = np.random.default_rng(0).uniform(-1, 1, (64, 9)).astype(np.float32)
    x[:, 0] *= 1000
    with pytest.raises(ModelRefused) as error:
        convert(model, "int8", "onnxruntime", [{"x": x}], calibration=PLAIN)
    assert "0.99 is asked" in error.value.message and "percentile" in error.value.hint


def test_nodes_that_cost_accuracy_are_held_and_named():
    rng = np.random.default_rng(0)
    bad = np.concatenate([np.zeros((1, 8)), np.eye(8)]).astype(np.float32)
    good = [rng.standard_normal((8, 8)).astype(np.float32) / 3 for _ in range(3)]
    model = graph(
        "(float[N,9] x) => (float[N,8] y) { a = MatMul(x, bad) b = MatMul(a, w0) c = MatMul(b, w1) y = MatMul(c, w2) }",
        bad=bad, w0=good[0], w1=good[1], w2=good[2],
    )  # fmt: skip
    x = rng.uniform(-1, 1, (64, 9)).astype(np.float32)
    x[:, 0] *= 1000
    result = convert(model, "int8", "onnxruntime", [{"x": x}], calibration=PLAIN)
    [held] = result.held
    assert held.op_type == "MatMul" and "costs accuracy" in held.reason
    assert result.counts["quantized_nodes"] == 3 and result.agreement >= 0.99
    # The held node reads the fp32 values, not what another node's int8 made of them.
    [node] = [n for n in result.model.graph if n.name == held.name]
    assert node.inputs[0].name == "x" and node.inputs[1].dtype == ir.DataType.FLOAT


@pytest.mark.parametrize(
    ("flags", "bits"),
    [({"avx2"}, 7), ({"avx2", "avx512f"}, 7), ({"avx512_vnni"}, 8), ({"avx_vnni"}, 8), (set(), 7)],
)
def test_b16_weights_have_7_bits_where_sums_of_products_saturate(flags, bits):
    got, notes = weight_bits("onnxruntime", None, frozenset(flags), machine="x86_64")
    assert got == bits and "VNNI" in notes[0].upper()
    assert weight_bits("onnxruntime", None, frozenset(flags), machine="aarch64")[0] == 8
    assert weight_bits("tensorrt", None, frozenset(flags), machine="x86_64") == (8, ())
    assert weight_bits("onnxruntime", False, frozenset(flags))[0] == 8
    # The arithmetic behind it: two products must fit 16 bits.
    top = np.abs(quantized_weight(f32(1, -1).reshape(1, 2), 0, bits)[0]).max()
    assert (2 * 255 * int(top) <= 32767) == (bits == 7)


def test_b16_large_activations_are_right_on_this_cpu():
    """All weights and activations at their largest: the kernel that saturates would be off by far."""
    w = np.full((256, 8), 1.0, np.float32)
    model = graph("(float[N,256] x) => (float[N,8] y) { y = MatMul(x, w) }", w=w)
    x = np.ones((4, 256), np.float32)
    for precision in ("int8", "int8_dynamic"):
        result = convert(model, precision, "onnxruntime", [{"x": x}])
        session = onnxruntime.InferenceSession(ir.to_proto(result.model).SerializeToString())
        assert np.allclose(session.run(None, {"x": x})[0], 256, rtol=0.01), precision
        assert any("VNNI" in note for note in result.notes)


def test_b16_saturation_is_real_where_there_is_no_vnni():
    """The same graph with 8 and 7 bits, literally and on the integer kernels: why 7 bits are chosen."""
    if weight_bits("onnxruntime", None, cpu_flags())[0] == 8:
        pytest.skip("this CPU adds products in 32 bits")
    rng = np.random.default_rng(1)
    w, x = rng.standard_normal((2, 5)).astype(np.float32), rng.standard_normal((16, 2)).astype(np.float32)
    model = graph("(float[N,2] x) => (float[N,5] y) { y = MatMul(x, w) }", w=w)
    want = run_outputs(model, [{"x": x}])
    scores = {}
    for reduce in (False, True):
        options = CalibrationOptions(reduce_range=reduce)
        result = convert(model, "int8", "onnxruntime", [{"x": x}], calibration=options)
        session = onnxruntime.InferenceSession(ir.to_proto(result.model).SerializeToString())
        scores[reduce] = (result.agreement, agreement(want, [{"y": session.run(None, {"x": x})[0]}]))
    assert scores[True] == pytest.approx((0.9999, 0.9999), abs=2e-4)
    assert scores[False][0] > 0.9999 and scores[False][1] < 0.99


def test_b17_a_graph_output_of_a_gemm_and_a_tensor_without_data():
    w = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
    model = graph(
        "(float[N,8] x, float[M,8] e) => (float[N,8] y, float[M,8] z) { y = Gemm(x, w) z = MatMul(e, w) }", w=w
    )
    sample = {
        "x": np.random.default_rng(1).standard_normal((4, 8)).astype(np.float32),
        "e": np.zeros((0, 8), np.float32),
    }
    result = convert(model, "int8", "onnxruntime", [sample])
    [held] = result.held
    assert held.op_type == "MatMul" and held.reason == "its input 'e' has no calibration data"
    assert result.counts["quantized_nodes"] == 1
    with pytest.raises(ModelRefused, match="no node of the graph can be int8"):
        convert(graph("(float[N] x) => (float[N] y) { y = Relu(x) }"), "int8", "onnxruntime", [{"x": f32(1)}])


def test_b17_a_percentile_that_would_clip_every_value_falls_back_to_min_max():
    """9,999 zeros and a 5: 99.9% of the values are 0, and a range of 0 would make the 5 a 0."""
    values = np.zeros(10_000, np.float32)
    values[17] = 5
    model = graph("(float[N] x) => (float[N] y) { y = Relu(x) }")
    options = CalibrationOptions(method="percentile", percentile=99.9)
    ranges = collect_ranges(model, ["x"], [{"x": values}], options)
    assert (ranges["x"].low, ranges["x"].high, ranges["x"].clipped) == (0.0, 5.0, 0.0)
    [note] = [n for n in range_notes(ranges, options) if "min-max" in n]
    assert note.startswith("percentile 99.9 would clip all that is not 0 of 1 tensor(s), such as 'x'")
    # Zeros alone have no other range.
    assert not collect_ranges(model, ["x"], [{"x": np.zeros(9, np.float32)}], options)["x"].fell_back


def test_b17_where_no_tensor_has_a_value_the_refusal_names_them():
    model = graph("(float[N,8] x) => (float[N,4] y) { y = Gemm(x, w) }", w=np.ones((8, 4), np.float32))
    for method in ("minmax", "percentile"):
        with pytest.raises(ModelRefused, match=r"\(Gemm\): its input 'x' has no calibration data"):
            convert(model, "int8", "onnxruntime", [{"x": np.zeros((0, 8), np.float32)}],
                    calibration=CalibrationOptions(method=method))  # fmt: skip


@pytest.mark.parametrize("method", ["minmax", "percentile"])
def test_percentiles_are_those_of_numpy_whatever_the_batches(method):
    values = np.random.default_rng(0).standard_normal(5000).astype(np.float32)
    model = graph("(float[N] x) => (float[N] y) { y = Relu(x) }")
    options = CalibrationOptions(method=method, percentile=99)
    want = (values.min(), values.max()) if method == "minmax" else tuple(np.percentile(values, [0.5, 99.5]))
    for parts in (1, 7, 5000):
        found = collect_ranges(model, ["x"], [{"x": p} for p in np.array_split(values, parts)], options)["x"]
        assert np.allclose((found.low, found.high), want, atol=1e-6)


@pytest.mark.parametrize("method", ["minmax", "percentile"])
def test_b18_scales_do_not_depend_on_the_calibration_batch(method):
    rng = np.random.default_rng(3)
    model = _convnet(rng)
    images = rng.standard_normal((32, 3, 16, 16)).astype(np.float32)
    options = CalibrationOptions(method=method, percentile=99.9)
    scales = []
    for batch in (1, 16):
        samples = [{"x": images[i : i + batch]} for i in range(0, 32, batch)]
        result = convert(model, "int8", "onnxruntime", samples, calibration=options)
        scales.append({n: v for n, v in _initializers(result.model).items() if n.endswith("_scale")})
    assert scales[0].keys() == scales[1].keys() and len(scales[0]) > 8
    assert all(np.allclose(scales[0][n], scales[1][n], rtol=1e-6, atol=0) for n in scales[0])


def test_b19_one_outlier_is_reported_and_percentile_clips_it():
    model = graph("(float[N,1] x) => (float[N,1] y) { y = MatMul(x, w) }", w=np.ones((1, 1), np.float32))
    values = np.append(np.linspace(-1, 1, 1000), 100).astype(np.float32).reshape(-1, 1)
    plain = collect_ranges(model, ["x"], [{"x": values}], CalibrationOptions())
    assert (plain["x"].low, plain["x"].high, plain["x"].bulk_levels) == (-1, 100, 7)
    [note] = range_notes(plain, CalibrationOptions())
    assert "7 of 256 levels" in note and "percentile" in note
    options = CalibrationOptions(method="percentile", percentile=99.8)
    clipped = collect_ranges(model, ["x"], [{"x": values}], options)["x"]
    assert np.allclose((clipped.low, clipped.high), np.quantile(values, [0.001, 0.999]), atol=1e-6)
    assert clipped.clipped == 2 / 1001 and clipped.bulk_levels > 250
    assert "0.200%" in range_notes({"x": clipped}, options)[0]


def test_dynamic_int8_needs_no_ranges_and_is_fused_by_onnxruntime(tmp_path):
    rng = np.random.default_rng(0)
    w = rng.standard_normal((32, 16)).astype(np.float32)
    model = graph(
        "(float[N,32] x) => (float[N,16] y) { a = MatMul(x, w) y = Gemm<transB=1>(a, v, b) }",
        w=w, v=rng.standard_normal((16, 16)).astype(np.float32), b=rng.standard_normal(16).astype(np.float32),
    )  # fmt: skip
    x = rng.standard_normal((8, 32)).astype(np.float32)
    result = convert(model, "int8_dynamic", "onnxruntime", [{"x": x}])
    proto = ir.to_proto(result.model)
    onnx.checker.check_model(proto, full_check=True)
    assert _ops(result.model).count("MatMulInteger") == 2 and result.agreement > 0.999
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = str(tmp_path / "fused.onnx")
    onnxruntime.InferenceSession(proto.SerializeToString(), options)
    assert [n.op_type for n in onnx.load(str(tmp_path / "fused.onnx")).graph.node] == ["DynamicQuantizeMatMul"] * 2
    with pytest.raises(ModelRefused, match="DynamicQuantizeLinear"):
        convert(model, "int8_dynamic", "tensorrt", [{"x": x}])


def test_agreement_sees_direction_scale_and_nan():
    want = [{"y": f32(1, 2, 3, 4)}]
    assert agreement(want, want) == 1.0
    assert agreement(want, [{"y": f32(2, 4, 6, 8)}]) == 0.5
    assert agreement(want, [{"y": f32(1, 2, 3, np.nan)}]) == -1.0
    assert agreement([{"y": f32(-np.inf, 1)}], [{"y": f32(-np.inf, 1)}]) == 1.0


def test_calibration_folders_are_checked(tmp_path: Path):
    with pytest.raises(UsageError, match=r"no \.npz file"):
        calibration_from_folder(tmp_path, ["x"])
    for index in range(3):
        np.savez(tmp_path / f"{index}.npz", x=np.full((2, 1), index, np.float32))
    assert [s["x"][0, 0] for s in calibration_from_folder(tmp_path, ["x"])] == [0, 1, 2]
    assert len(calibration_from_folder(tmp_path / "1.npz", ["x"])) == 1
    with pytest.raises(UsageError, match="lacks 'mask'"):
        calibration_from_folder(tmp_path, ["x", "mask"])
    with pytest.raises(UsageError, match="has 'x', which is no input"):
        calibration_from_folder(tmp_path, [])
    np.savez(tmp_path / "3.npz", x=np.array([{"a": 1}], dtype=object))
    with pytest.raises(UsageError, match="Python objects"):
        calibration_from_folder(tmp_path, ["x"])
    (tmp_path / "3.npz").write_bytes(b"not a zip")
    with pytest.raises(UsageError, match="not plain arrays"):
        calibration_from_folder(tmp_path, ["x"])
    assert len(samples_from(({"x": f32(i)} for i in range(4)), ["x"])) == 4


def test_options_are_checked():
    for wrong in ({"method": "entropy"}, {"percentile": 0}, {"min_cosine": 2}, {"max_runs": 0}):
        with pytest.raises(ValueError, match="allowed"):
            CalibrationOptions(**wrong)


@settings(max_examples=25, deadline=None)
@given(
    widths=st.lists(st.integers(2, 24), min_size=2, max_size=5),
    target=st.sampled_from(("onnxruntime", "openvino", "tensorrt")),
    dynamic=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_random_products_stay_within_tolerance_or_are_refused(widths, target, dynamic, seed):
    rng = np.random.default_rng(seed)
    constants: dict[str, np.ndarray] = {}
    body, last = [], "x"
    for index, (rows, columns) in enumerate(pairwise(widths)):
        constants[f"w{index}"] = (rng.standard_normal((rows, columns)) * 10.0 ** rng.integers(-3, 3)).astype(np.float32)
        if rng.random() < 0.5:
            constants[f"b{index}"] = rng.standard_normal(columns).astype(np.float32)
            body.append(f"v{index} = Gemm({last}, w{index}, b{index})")
        else:
            body.append(f"v{index} = MatMul({last}, w{index})")
        last = f"v{index}"
        if rng.random() < 0.5:
            body.append(f"r{index} = Relu({last})")
            last = f"r{index}"
    model = graph(f"(float[N,{widths[0]}] x) => (float[N,{widths[-1]}] {last}) {{ {' '.join(body)} }}", **constants)
    samples = [{"x": rng.standard_normal((16, widths[0])).astype(np.float32)}]
    precision, target = ("int8_dynamic", "onnxruntime") if dynamic else ("int8", target)
    try:
        result = convert(model, precision, target, samples)
    except ModelRefused as error:
        assert "agreement with fp32" in error.message
        return
    proto = ir.to_proto(result.model)
    onnx.checker.check_model(proto, full_check=True)
    assert agreement(run_outputs(model, samples), run_outputs(result.model, samples)) >= 0.99
    if target != "onnxruntime":
        return  # 8-bit weights for TensorRT's kernels: on a CPU without VNNI ONNX Runtime's would saturate (b16)
    # ONNX Runtime's integer kernels agree with the graph's own arithmetic.
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    got = [{last: session.run(None, samples[0])[0]}]
    assert agreement(run_outputs(model, samples), got) >= 0.98
