"""Forms of weights and caches: what each does to the values, and to the answers of a real model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from backends.llm.engine.outputs import BlockId, RequestId, ScheduledRequest, SchedulerOutput
from backends.llm.loaders import load_model
from backends.llm.loaders.base import DenseWeight, GroupedWeight, LoadedModel, Weight
from backends.llm.models.weights import stack, values
from backends.llm.runners.cpu_options import CpuOptions
from backends.llm.runners.openvino import OpenVinoRunner
from backends.llm.runners.openvino.forms import converted, fit_a_byte, rows_of_bytes, scales_and_zeros, with_sums
from compiler.errors import UsageError


def _grouped(rows: int, groups: int, seed: int = 0, size: int = 32) -> GroupedWeight:
    random = np.random.default_rng(seed)
    scales = random.uniform(0.01, 0.02, (rows, groups)).astype(np.float32)
    mins = -scales * random.uniform(2, 13, (rows, groups)).astype(np.float32)
    return GroupedWeight(random.integers(0, 16, (rows, groups * size), dtype=np.uint8), scales, mins, 4, size)


def _steps_off(weight: GroupedWeight, got: np.ndarray) -> float:
    """Returns the largest error, in steps of the codes."""
    return float((np.abs(got - values(weight)).reshape(*weight.scales.shape, -1) / weight.scales[..., None]).max())


@pytest.mark.parametrize("groups", [18, 32, 48])
def test_sums_give_back_what_whole_zero_points_lose(groups: int) -> None:
    weight = _grouped(40, groups)
    summed = with_sums(weight)
    assert summed is not None and fit_a_byte(scales_and_zeros(summed)[2])
    columns = groups * 32
    assert summed.codes.shape[1] == columns + {18: 32, 32: 32, 48: 64}[groups]
    wide = values(summed)
    assert not wide[:, columns + groups :].any()
    rounded = wide[:, :columns]
    assert 0.4 < _steps_off(weight, rounded) <= 0.5001
    assert _steps_off(weight, rounded + np.repeat(wide[:, columns : columns + groups], 32, axis=1)) < 0.08


def test_widened_codes_are_a_34th_of_a_step_off_at_most() -> None:
    weight = _grouped(40, 4)
    wide = converted(weight, "u8")
    assert isinstance(wide, GroupedWeight) and wide.bits == 8 and fit_a_byte(scales_and_zeros(wide)[2])
    assert _steps_off(weight, values(wide)) < 1 / 33


def test_rows_of_bytes_are_half_a_step_off_at_most() -> None:
    weight = _grouped(40, 4)
    rows = rows_of_bytes(weight)
    assert rows.scales.shape == (40, 1) and fit_a_byte(scales_and_zeros(rows)[2])
    wide = values(weight)
    step = (np.maximum(wide.max(1), 0) - np.minimum(wide.min(1), 0)) / 255
    np.testing.assert_allclose(rows.scales[:, 0], step, rtol=1e-6)
    assert (np.abs(values(rows) - wide) <= 1.001 * step[:, None]).all()  # half for the code, half for the zero point
    tall = rows_of_bytes(DenseWeight(np.tile(wide, (100, 1))))  # it is made piece by piece
    np.testing.assert_array_equal(values(tall), np.tile(values(rows), (100, 1)))
    flat = rows_of_bytes(DenseWeight(np.array([[0, 0], [3, 3], [-2, -2]], dtype=np.float32)))
    np.testing.assert_allclose(values(flat), [[0, 0], [3, 3], [-2, -2]], rtol=1e-6)


def test_what_needs_no_form_stays_as_it_is() -> None:
    weight = _grouped(4, 2)
    whole = replace(weight, mins=-8 * weight.scales)
    outside = replace(weight, mins=weight.scales)  # a zero point of -1 is no byte
    assert with_sums(whole) is None and converted(whole, "u8") is whole
    assert with_sums(outside) is None and converted(outside, "u8") is outside
    dense = DenseWeight(np.ones((2, 3), dtype=np.float32))
    assert with_sums(dense) is None and converted(dense, "u4") is dense
    np.testing.assert_array_equal(values(converted(weight, "f32")), values(weight))


def test_a_group_without_a_scale_keeps_its_value() -> None:
    weight = _grouped(2, 2)
    weight.scales[0, 1] = 0
    codes, scales, zeros = scales_and_zeros(weight)
    again = scales.repeat(32, axis=1) * (codes - zeros.repeat(32, axis=1))
    np.testing.assert_allclose(again, values(weight), rtol=1e-5, atol=1e-7)


def test_matrices_are_put_together_only_if_they_are_stored_alike() -> None:
    first, second = _grouped(3, 2), _grouped(5, 2, seed=1)
    together = stack([first, second])
    assert together is not None
    np.testing.assert_array_equal(values(together), np.concatenate([values(first), values(second)]))
    assert stack([first, _grouped(5, 4, size=16)]) is None
    assert stack([first, DenseWeight(values(second))]) is None


def _log_probabilities(model: LoadedModel, options: CpuOptions) -> np.ndarray:
    runner = OpenVinoRunner(model, replace(options, kv_cache_bytes=1 << 24, num_threads=2))
    ids = (np.arange(96) * 37 % 3000 + 1000).tolist()
    blocks = [BlockId(b) for b in (2, 0, 1)]
    step = SchedulerOutput((ScheduledRequest(RequestId("a"), ids, 0, blocks, len(ids)),))
    logits = runner.execute(step).logits.astype(np.float64)
    runner.close()
    logits -= logits.max(axis=1, keepdims=True)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


class _Changed(dict[str, Weight]):
    """Weights that pass through a function when they are read."""

    def __init__(self, model: LoadedModel, change: Callable[[Weight], Weight]) -> None:
        super().__init__(dict.fromkeys(model.weights))  # type: ignore[arg-type]
        self._read, self._change = model.weights, change

    def __getitem__(self, name: str) -> Weight:
        return self._change(self._read[name])


def _rounded(weight: Weight) -> Weight:
    if isinstance(weight, DenseWeight):
        return weight
    return replace(weight, mins=np.rint(weight.mins / weight.scales) * weight.scales)


@pytest.fixture(scope="module")
def exact(smollm2: Path) -> tuple[LoadedModel, np.ndarray]:
    model = load_model(smollm2)
    return model, _log_probabilities(model, CpuOptions(exact=True))


def _divergence(wanted: np.ndarray, got: np.ndarray) -> float:
    return float((np.exp(wanted) * (wanted - got)).sum(axis=1).mean())


@pytest.mark.parametrize(
    "options",
    [
        CpuOptions(),
        CpuOptions(weights="u4"),
        CpuOptions(weights="u8"),
        CpuOptions(weights="bf16"),
        CpuOptions(weights="stored"),
        CpuOptions(kv_cache_precision="u8"),
    ],
    ids=lambda o: f"{o.weights}-{o.kv_cache_precision}",
)
def test_every_form_answers_nearly_as_the_exact_mode(
    exact: tuple[LoadedModel, np.ndarray], options: CpuOptions
) -> None:
    model, wanted = exact
    assert _divergence(wanted, _log_probabilities(model, options)) < 0.03


def test_rounded_zero_points_would_not_pass(exact: tuple[LoadedModel, np.ndarray]) -> None:
    model, wanted = exact
    rounded = replace(model, weights=_Changed(model, _rounded))
    assert _divergence(wanted, _log_probabilities(rounded, CpuOptions(weights="u4"))) > 0.1


def test_the_cache_gets_the_bytes_it_was_given(exact: tuple[LoadedModel, np.ndarray]) -> None:
    model, _ = exact
    runner = OpenVinoRunner(model, CpuOptions(exact=True, kv_cache_bytes=10_000_000))
    # 2 x 30 layers x 3 heads x 64 x 32 tokens x 4 bytes
    assert (runner.block_size, runner.block_bytes, runner.num_blocks) == (32, 1_474_560, 6)
    with pytest.raises(UsageError, match="kv_cache_bytes is 1000; one block takes"):
        OpenVinoRunner(model, CpuOptions(exact=True, kv_cache_bytes=1000))


def test_unknown_options_are_refused() -> None:
    with pytest.raises(UsageError, match="weights is 'int3'; allowed: u8_rows, u4, u8, bf16, f32, stored"):
        CpuOptions(weights="int3")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="num_threads is -1"):
        CpuOptions(num_threads=-1)
