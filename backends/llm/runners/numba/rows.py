"""What is done to a row of numbers between two products: norms, activations, rotations, bytes.

Plain loops that LLVM makes into vectors. A row's result depends on that row alone, in every bit.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from backends.llm.runners.numba.compiling import inner

_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_SQRT_2_OVER_PI = np.float32(0.7978845608028654)


@intrinsic
def _float_of_bits(context, bits):  # type: ignore[no-untyped-def]
    return types.float32(types.int32), lambda c, b, s, a: b.bitcast(a[0], ir.FloatType())


@intrinsic
def _bits_of_float(context, number):  # type: ignore[no-untyped-def]
    return types.int32(types.float32), lambda c, b, s, a: b.bitcast(a[0], ir.IntType(32))


@intrinsic
def _rounded(context, number):  # type: ignore[no-untyped-def]
    """The nearest integer, halves to even, as the processor rounds."""

    def codegen(c, b, s, a):  # type: ignore[no-untyped-def]
        kind = ir.FunctionType(ir.FloatType(), [ir.FloatType()])
        return b.call(cgutils.get_or_insert_function(b.module, kind, "llvm.rint.f32"), a)

    return types.float32(types.float32), codegen


@njit(inline="always")
def exponential(x):  # type: ignore[no-untyped-def]
    """Returns e ** x in float32 to about one unit in the last place (Cephes' expf); no less than that of -87."""
    x = np.float32(-87.0) if x < np.float32(-87.0) else x  # what is no number stays none
    x = np.float32(88.0) if x > np.float32(88.0) else x
    whole = _rounded(x * _LOG2_E)
    r = x - whole * _LN2_HIGH - whole * _LN2_LOW
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * r * r + r + np.float32(1.0)
    return p * _float_of_bits((np.int32(whole) + np.int32(127)) << np.int32(23))


@njit(inline="always")
def bfloat(x):  # type: ignore[no-untyped-def]
    """Returns a float32 as the bits of the nearest bfloat16, halves to even."""
    bits = _bits_of_float(x)
    return np.int16((bits + np.int32(0x7FFF) + ((bits >> np.int32(16)) & np.int32(1))) >> np.int32(16))


@inner
def norm(row, weight, eps, out):  # type: ignore[no-untyped-def]
    """Writes RMSNorm(row) * weight to out; it may be the row itself. The squares are summed in 16 lanes."""
    lanes = np.zeros(16, np.float32)
    n = row.size
    for start in range(0, n - n % 16, 16):
        for lane in range(16):
            lanes[lane] += row[start + lane] * row[start + lane]
    for i in range(n - n % 16, n):
        lanes[i % 16] += row[i] * row[i]
    total = np.float32(0)
    for lane in range(16):
        total += lanes[lane]
    factor = np.float32(1.0) / np.sqrt(total / np.float32(n) + eps)
    for i in range(n):
        out[i] = row[i] * factor * weight[i]


@inner
def to_bytes(row, size, codes, scales):  # type: ignore[no-untyped-def]
    """Writes a row as signed bytes with a scale for each group, filled up with zeros; returns the sum of its values.

    Args:
        row: [columns] float32.
        size: of a group.
        codes: [groups * size] int8.
        scales: [groups] float32.
    """
    total = np.float32(0)
    whole = row.size // size
    for group in range(whole):
        total += _group(row[size * group :], size, codes[size * group :], scales[group:])
    if whole < scales.size:
        rest = row.size - size * whole
        total += _group(row[size * whole :], rest, codes[size * whole :], scales[whole:])
        codes[row.size :] = 0
    return total


@njit(inline="always")
def _group(values, size, codes, scale):  # type: ignore[no-untyped-def]
    largest = np.int32(0)  # the bits of positive numbers are in their order
    for i in range(size):
        largest = max(largest, _bits_of_float(values[i]) & np.int32(0x7FFFFFFF))
    scale[0] = _float_of_bits(largest) * np.float32(1 / 127)
    inverse = np.float32(1) / scale[0] if scale[0] > np.float32(0) else np.float32(0)
    count = np.int32(0)
    for i in range(size):
        code = np.int32(_rounded(values[i] * inverse))
        codes[i] = np.int8(code)
        count += code
    return scale[0] * np.float32(count)


@inner
def rotate(head, cos, sin):  # type: ignore[no-untyped-def]
    """Rotates a head in place, by halves: x * cos + [-x2, x1] * sin."""
    half = cos.size
    for i in range(half):
        first, second = head[i], head[half + i]
        head[i] = first * cos[i] - second * sin[i]
        head[half + i] = second * cos[i] + first * sin[i]


@inner
def gated(gate, up, gelu, out):  # type: ignore[no-untyped-def]
    """Writes act(gate) * up to out, with SiLU or GELU by tanh."""
    one = np.float32(1)
    if gelu:
        for i in range(gate.size):
            x = gate[i]
            inner = _SQRT_2_OVER_PI * (x + np.float32(0.044715) * x * x * x)
            # 0.5 * (1 + tanh(y)) is 1 / (1 + exp(-2 * y))
            out[i] = x / (one + exponential(np.float32(-2) * inner)) * up[i]
    else:
        for i in range(gate.size):
            x = gate[i]
            out[i] = x / (one + exponential(-x)) * up[i]
