"""Outlier channels of activations moved into the weights, so that one int8 scale can serve all channels.

    y = x W = (x / s) (s W)        s: one factor for each channel of x

In transformers a few channels are far larger than the rest, and int8 with one scale for all leaves these few levels.
Dividing them by s makes the channels alike; the rows of the weight take the factors. It costs one elementwise product.
After "SmoothQuant" (Xiao et al., 2022), with the exponent chosen for each tensor by the noise that it predicts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from compiler.precision.calibration import Floats
from compiler.precision.graph import constant
from compiler.precision.observe import Samples, observe
from compiler.precision.quantize import SMOOTHED_OPS
from compiler.precision.weights import Smoothing, weight_of

if TYPE_CHECKING:
    import onnx_ir as ir

Doubles = NDArray[np.float64]

EXPONENTS = (0.5, 0.6, 0.7, 0.8, 0.9)
# The elementwise product must be worth it: the predicted noise falls at least to this part.
WORTH = 0.6


@dataclass
class Channels:
    """What was seen of each channel (last axis) of a tensor.

    Attributes:
        low, high: extremes, [channels].
        squares: sums of squares, [channels].
        rows: how many values each channel had.
    """

    low: Doubles
    high: Doubles
    squares: Doubles
    rows: int

    @property
    def mean_square(self) -> Doubles:
        return self.squares / max(1, self.rows)


def collect_channels(model: ir.Model, names: Sequence[str], samples: Samples) -> dict[str, Channels]:
    """Runs the fp32 graph and returns the channels of each tensor; those with NaN or infinity are left out."""
    seen: dict[str, Channels] = {}
    broken: set[str] = set()
    for arrays in observe(model, names, samples):
        for name, array in arrays.items():
            if array.ndim < 2 or not array.size:
                continue
            rows: Doubles = np.asarray(array, dtype=np.float64).reshape(-1, array.shape[-1])
            if not np.isfinite(rows).all():
                broken.add(name)
                continue
            low, high, squares = rows.min(axis=0), rows.max(axis=0), (rows**2).sum(axis=0)
            if name in seen:
                one = seen[name]
                low, high = np.minimum(one.low, low), np.maximum(one.high, high)
                seen[name] = Channels(low, high, one.squares + squares, one.rows + len(rows))
            else:
                seen[name] = Channels(low, high, squares, len(rows))
    return {n: c for n, c in seen.items() if n not in broken}


def find_smoothing(model: ir.Model, names: Sequence[str], samples: Samples, weight_bits: int) -> dict[str, Smoothing]:
    """Returns the factors by tensor, for those in which they make the predicted noise much smaller.

    Args:
        model: a prepared fp32 graph.
        names: nodes that may be int8.
        samples: calibration data.
        weight_bits: of the scheme.
    """
    readers: dict[str, list[ir.Node]] = {}
    chosen = set(names)
    for node in model.graph:
        data = node.inputs[0] if node.inputs else None
        if node.name in chosen and node.op_type in SMOOTHED_OPS and data is not None and data.name:
            readers.setdefault(data.name, []).append(node)
    found = collect_channels(model, list(readers), samples)
    # One tensor's weights at a time: a large model's do not fit twice.
    smoothing = {n: _best(c, [_rows_by_input(r) for r in readers[n]], weight_bits) for n, c in found.items()}
    return {n: s for n, s in smoothing.items() if s is not None}


def _rows_by_input(node: ir.Node) -> Floats:
    """Returns a node's weight as [input channels, output channels]."""
    weight = weight_of(node)
    assert weight is not None
    array = constant(node.inputs[weight.index])
    assert array is not None
    return np.asarray(array if weight.axis == 1 else array.T, dtype=np.float32)


def _best(channels: Channels, weights: Sequence[Floats], bits: int) -> Smoothing | None:
    ones = np.ones_like(channels.low)
    plain = _noise(channels, weights, ones, bits)
    options = [_factors(channels, weights, exponent) for exponent in EXPONENTS]
    noise, best = min((_noise(channels, weights, f, bits), i) for i, f in enumerate(options))
    if not noise < WORTH * plain:
        return None
    factors = options[best].astype(np.float32)
    low, high = _range(channels, factors)
    return Smoothing(factors, low, high)


def _factors(channels: Channels, weights: Sequence[Floats], exponent: float) -> Doubles:
    """Returns |x|^a / |W|^(1-a) by channel, with a geometric mean of 1."""
    data = np.maximum(np.abs(channels.low), np.abs(channels.high))
    rows = np.max([np.abs(w).max(axis=1) for w in weights], axis=0)
    empty, unread = data <= 1e-5 * data.max(), rows <= 1e-5 * rows.max()
    usable = ~(empty | unread)
    if not usable.any():
        return np.ones_like(data)
    logs = np.where(usable, exponent * np.log(np.where(usable, data, 1)), 0.0)
    logs -= np.where(usable, (1 - exponent) * np.log(np.where(usable, rows, 1)), 0.0)
    centred = np.where(usable, logs - logs[usable].mean(), 0.0)
    factors: Doubles = np.exp(centred)
    # A channel that no weight reads must not stretch the range; an empty one has nothing to divide.
    smallest = (data[usable] / factors[usable]).min()
    return np.where(unread & ~empty, data / smallest, factors)


def _range(channels: Channels, factors: Doubles | Floats) -> tuple[float, float]:
    return min(0.0, float((channels.low / factors).min())), max(0.0, float((channels.high / factors).max()))


def _noise(channels: Channels, weights: Sequence[Floats], factors: Doubles, bits: int) -> float:
    """Predicts the noise of the products' outputs over their power: rounding is uniform, step^2 / 12 everywhere."""
    low, high = _range(channels, factors)
    step = (high - low) / 255
    power = channels.mean_square
    total = 0.0
    for weight in weights:
        squares = np.einsum("ij,ij->i", weight, weight).astype(np.float64)
        steps = np.abs(weight * factors[:, None].astype(np.float32)).max(axis=0) / (2 ** (bits - 1) - 1)
        of_data = step**2 * float((squares * factors**2).sum())
        of_weight = float((power / factors**2).sum()) * float((steps.astype(np.float64) ** 2).sum())
        total += (of_data + of_weight) / max(float((power * squares).sum()), 1e-300)
    return total
