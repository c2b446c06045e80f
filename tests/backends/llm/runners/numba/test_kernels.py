"""The kernels against numpy in float64: products, attention, what is done to rows."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from numba import njit

from backends.llm.loaders.base import DenseWeight
from backends.llm.models.weights import rows_of_bytes, values
from backends.llm.runners.memory import zeroed
from backends.llm.runners.numba import attention, rows
from backends.llm.runners.numba.packing import Cutter, _ModelCutter, pack
from backends.llm.runners.numba.product import product
from backends.llm.runners.numba.vectors import HAS_BFLOAT

SEED = np.random.default_rng(11)


@njit
def call_product(*arguments):
    product(*arguments)


@njit
def call_to_bytes(row, size, codes, scales):
    return rows.to_bytes(row, size, codes, scales)


@njit
def call_write(key, value, keys, values, slot, alone):
    attention.write_token(key, value, keys, values, slot, alone)


@njit
def call_span(*arguments):
    attention.attend_span(*arguments)


@njit
def call_merge(totals, mixed, more_totals, more):
    attention.merge(totals, mixed, more_totals, more)


@njit
def call_rows(kind, row, other, out):
    if kind == 0:
        rows.norm(row, other, np.float32(1e-5), out)
    elif kind == 1:
        rows.gated(row, other, False, out)
    elif kind == 2:
        rows.gated(row, other, True, out)
    else:
        for i in range(row.size):
            out[i] = rows.exponential(row[i])


def aligned(shape, kind):
    return Cutter(zeroed(int(np.prod(shape)) * np.dtype(kind).itemsize)).cut(shape, kind)


def packed(matrix: np.ndarray, group: int):
    counter = _ModelCutter(None)
    counter.matrix(*matrix.shape, group=group)
    made = _ModelCutter(zeroed(counter.size)).matrix(*matrix.shape, group=group)
    pack([rows_of_bytes(DenseWeight(matrix))], made)
    return made


def as_bytes(x: np.ndarray, columns: int, group: int):
    codes = np.full((len(x), columns), 77, np.int8)
    scales = np.zeros((len(x), columns // group), np.float32)
    totals = np.array([call_to_bytes(row, group, codes[i], scales[i]) for i, row in enumerate(x)], np.float32)
    return codes, scales, totals


@pytest.mark.parametrize("group", [32, 64])
@pytest.mark.parametrize(("out", "width"), [(64, 192), (131, 96), (200, 100), (7, 70)])
def test_a_product_is_that_of_its_bytes(out, width, group):
    matrix = SEED.normal(size=(out, width)).astype(np.float32)
    made = packed(matrix, group)
    x = SEED.normal(size=(9, width)).astype(np.float32) * SEED.lognormal(size=(9, 1)).astype(np.float32)
    codes, scales, totals = as_bytes(x, made.columns, made.group)
    wide = (codes.reshape(9, -1, made.group) * scales[..., None].astype(np.float64)).reshape(9, -1)[:, :width]
    wanted = wide @ values(rows_of_bytes(DenseWeight(matrix))).astype(np.float64).T
    found = {}
    for count in range(1, 10):
        result = np.full((count, made.rows), np.nan, np.float32)
        call_product(
            made.codes.ctypes.data, made.factors.ctypes.data, made.columns, made.group, codes.ctypes.data,
            scales.ctypes.data, totals.ctypes.data, count, 0, made.rows // 64, result.ctypes.data, 4 * made.rows,
        )  # fmt: skip
        found[count] = result
        np.testing.assert_allclose(result[:, :out], wanted[:count], rtol=0, atol=2e-6 * np.abs(wanted).max())
        np.testing.assert_array_equal(result[:, out:], 0)
    for count, result in found.items():  # a row has the same bits whatever is computed beside it
        np.testing.assert_array_equal(result, found[9][:count])


def test_bytes_are_the_nearest_and_their_sum_is_theirs():
    x = SEED.normal(size=(3, 100)).astype(np.float32)
    x[1, 64:] = 0
    codes, scales, totals = as_bytes(x, 128, 64)
    assert codes[:, 100:].tolist() == [[0] * 28] * 3
    assert scales[1, 1] == 0
    back = (codes.reshape(3, 2, 64) * scales[..., None]).reshape(3, 128)[:, :100]
    assert np.abs(back - x).max() <= scales.max() / 2 * 1.001
    assert np.abs(codes).max() == 127
    np.testing.assert_allclose(totals, back.sum(1), atol=1e-4)


def test_rows():
    x, other = (SEED.normal(size=1000).astype(np.float32) * 4 for _ in range(2))
    x[:3] = (-200, 0, 60)
    out = np.empty_like(x)
    wide = x.astype(np.float64)
    call_rows(0, x, other, out)
    np.testing.assert_allclose(out, wide / np.sqrt((wide**2).mean() + 1e-5) * other, rtol=2e-6)
    call_rows(1, x, other, out)
    np.testing.assert_allclose(out, wide / (1 + np.exp(-wide)) * other, rtol=2e-6, atol=1e-30)
    call_rows(2, x, other, out)
    gelu = 0.5 * wide * (1 + np.tanh(np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)))
    np.testing.assert_allclose(out, gelu * other, rtol=1e-4, atol=1e-6)
    x = np.linspace(-87, 88, 1000, dtype=np.float32)
    call_rows(3, x, x, out)
    np.testing.assert_allclose(out, np.exp(x.astype(np.float64)), rtol=3e-7)
    x[0] = np.nan
    call_rows(3, x, x, out)
    assert np.isnan(out[0])


def bfloats(x: np.ndarray) -> np.ndarray:
    """Returns the nearest bfloat16 as float32."""
    import ml_dtypes

    return x.astype(ml_dtypes.bfloat16).astype(np.float32)


def attended(query, keys, values, position, group, window, cap):
    """The plain way, in float64; query is [rows, width], keys and values are [tokens, width]."""
    out = np.zeros(query.shape)
    for row, one in enumerate(query.astype(np.float64)):
        at = position + row // group
        first = max(0, at - window + 1) if window else 0
        scores = keys[first : at + 1].astype(np.float64) @ one
        scores = cap * np.tanh(scores / cap) if cap else scores
        weights = np.exp(scores - scores.max())
        out[row] = weights @ values[first : at + 1] / weights.sum()
    return out


@pytest.mark.parametrize("width", [16, 64, 80, 128])
@pytest.mark.parametrize(("window", "cap"), [(0, 0.0), (24, 0.0), (300, 0.0), (0, 5.0)])
@pytest.mark.parametrize("position", [0, 5, 250, 255, 600])
def test_attention_is_that_of_the_plain_way(width, window, cap, position):
    group, tokens = 3, 4
    count = position + tokens
    query = bfloats(SEED.normal(size=(group * tokens, width)) * width**-0.5 * 2)
    key, value = (bfloats(SEED.normal(size=(count, width))) for _ in range(2))
    wanted = attended(query, key, value, position, group, window, cap)
    number = -(-count // attention.BLOCK)
    table = SEED.permutation(number + 3)[:number].astype(np.int32)
    cache = [aligned((number + 3, width * attention.BLOCK), np.int16) for _ in range(2)]
    for memory in cache:
        memory[:] = 0x7FC0  # what is left of others is no number
    for at in range(count):
        block = table[at // attention.BLOCK]
        call_write(key[at], value[at], cache[0][block], cache[1][block], at % attention.BLOCK, at == count - 1)
    stored = aligned((16, width), attention.QUERY_TYPE)
    stored[: len(query)] = query.view(np.int32) >> 16 if HAS_BFLOAT else query
    scores, out = aligned((16, attention.SPAN), np.float32), aligned((16, width), np.float32)
    totals, mixed, merged = (aligned(shape, np.float32) for shape in ((16, 2), (16, width), (16, 2)))
    first = max(0, position - window + 1) // attention.SPAN if window else 0
    for span in range(first, (count - 1) // attention.SPAN + 1):
        call_span(
            stored, len(query), group, position, window, np.array([cap], np.float32), span, cache[0].ctypes.data,
            cache[1].ctypes.data, table, 2 * width * attention.BLOCK, scores, totals, out,
        )  # fmt: skip
        for row in range(len(query)):
            call_merge(merged[row], mixed[row], totals[row], out[row])
    found = mixed[: len(query)] / merged[: len(query), 1:]
    np.testing.assert_allclose(found, wanted, atol=8e-3 if HAS_BFLOAT else 3e-6)


def test_a_token_is_cleared_after_when_it_is_the_last():
    keys, values = (np.full(16 * 16, 0x7FC0, np.int16) for _ in range(2))
    one = np.arange(16, dtype=np.float32)
    call_write(one, one, keys, values, 4, False)
    assert (keys == 0x7FC0).sum() == (values == 0x7FC0).sum() == 15 * 16
    call_write(one, one, keys, values, 5, True)
    assert (keys == 0x7FC0).sum() == (values == 0x7FC0).sum() == 4 * 16


@pytest.mark.skipif(not HAS_BFLOAT, reason="the tests here are those without bfloat16 products already")
def test_without_products_of_bfloat16_all_of_this_holds_more_closely():
    from llvmlite import binding

    features = [f"+{name}" for name, here in binding.get_host_cpu_features().items() if here and name != "avx512bf16"]
    settings = {"NUMBA_CPU_NAME": "skylake-avx512", "NUMBA_CPU_FEATURES": ",".join([*features, "-avx512bf16"])}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed, 1 skipped" in done.stdout
