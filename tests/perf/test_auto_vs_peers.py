"""The benchmark of auto: its figures are what they say, and its models are fit to be judged."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from compiler.cases import Case
from compiler.dtypes import AnyArray
from perf.benchmarks.auto_vs_peers import AUTO, EAGER, ROUNDS, Floor, Row, floors_of, measure, table
from perf.benchmarks.compile_cost import Cost
from perf.benchmarks.peers import eager, onnxruntime_default, openvino_default
from perf.benchmarks.resnet18 import HIGHEST, LOWEST, build_resnet18, images, samples

ROWS = [
    Row(EAGER, (40.0, 50.0, 60.0), 1.0),
    Row("peer", (10.0, 12.0, 15.0), 1.0),
    Row(AUTO, (10.0, 10.0, 20.0), 0.9995),
]


def test_ratios_are_medians_over_the_rounds():
    """A machine that is slow for one round slows both: the round's ratio counts, not the ratio of the medians."""
    peer, auto = ROWS[1], ROWS[2]
    assert auto.median_ms == 10.0 and auto.ratio(ROWS[0]) == 4.0  # of 4, 5 and 3
    assert auto.ratio(peer) == 1.0  # of 1, 1.2 and 0.75


def test_floors_are_judged_against_the_best_peer_eager_and_the_cosine():
    best, multiple, cosine = floors_of(ROWS, times_eager=4.5)
    assert best == Floor("auto to the best peer, peer", 0.97, 1.0) and best.passed
    assert multiple == Floor("auto to eager", 4.5, 4.0) and not multiple.passed
    assert cosine.passed and cosine.got == 0.9995
    assert multiple.line() == "FAIL  auto to eager: 4, at least 4.5"


def test_the_table_tells_the_share_of_the_processor():
    lines = table(ROWS, batch=8, flops=20e9)
    assert lines[0].split()[:2] == ["batch", "8"]
    assert lines[3].split() == ["auto", "10.00", "4.00x", "3.00-5.00", "0.999500", "2000"]


def test_one_that_does_not_run_is_told_and_left_out(capsys):
    def broken(inputs) -> dict[str, AnyArray]:
        raise RuntimeError("no C++ compiler")

    def right(inputs) -> dict[str, AnyArray]:
        return {"y": inputs["x"] * 2}

    def wrong(inputs) -> dict[str, AnyArray]:
        return {"y": inputs["x"] * np.array([2.0, -2.0], dtype=np.float32)}

    case = Case("c", {}, {"x": np.array([[3.0, 4.0]], dtype=np.float32)})
    rows = measure({EAGER: right, "torch.compile": broken, AUTO: wrong}, case)
    assert [row.name for row in rows] == [EAGER, AUTO]
    assert "torch.compile does not run here: no C++ compiler" in capsys.readouterr().out
    assert rows[1].cosine == pytest.approx((9 - 16) / 25)


def test_what_is_timed_is_the_clock_that_was_given():
    """Processor time for one thread on a busy machine: each reading here is a millisecond after the last."""
    readings = iter(range(0, 10**12, 1_000_000))
    case = Case("c", {}, {"x": np.ones((1, 2), dtype=np.float32)})
    rows = measure({EAGER: lambda inputs: {"y": inputs["x"]}}, case, lambda: next(readings))
    assert rows[0].ms == (1.0,) * ROUNDS


def test_the_resnet_keeps_its_activations_in_bounds():
    """Untouched batch norms would let them grow or vanish, and no quantised form could be judged on that."""
    model = build_resnet18()
    x = torch.from_numpy(images(2, 99))
    with torch.inference_mode():
        hidden = model.stem(x)
        for block in model.blocks:
            hidden = block(hidden)
            assert 0.2 < float(hidden.std()) < 2 and float(hidden.max()) < 30
        assert torch.equal(model(x), build_resnet18()(x))  # seeded: the same network in every run
    low, high = np.float32(LOWEST), np.float32(HIGHEST)
    assert all(low <= s["pixels"].min() and s["pixels"].max() <= high for s in samples())


def test_the_peers_answer_as_eager_does(tmp_path):
    module = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3)).eval()
    torch.onnx.export(module, (torch.zeros(2, 6),), str(tmp_path / "model.onnx"), dynamo=True, verbose=False,
                      input_names=["input"], output_names=["y"])  # fmt: skip
    inputs = {"input": np.random.default_rng(0).standard_normal((2, 6)).astype(np.float32)}
    want = eager(module, "y")(inputs)["y"]
    for peer in (onnxruntime_default, openvino_default):
        # OpenVINO's default is bf16 where the CPU has it.
        np.testing.assert_allclose(peer(tmp_path / "model.onnx", 1)(inputs)["y"], want, rtol=2e-2, atol=2e-2)


def test_memory_may_be_four_times_the_weights_and_a_gigabyte():
    assert Cost(1.0, 1.0, {}, 0, weight_bytes=100 << 20).max_bytes == (400 << 20) + (1 << 30)
