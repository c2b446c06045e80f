"""Calibration: the range of each tensor over all values of the samples.

Ranges are taken over the values, never over batches: the same data cut into other batches gives the same scales.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from compiler.dtypes import AnyArray
from compiler.precision.observe import Samples, observe
from compiler.precision.result import CalibrationOptions

if TYPE_CHECKING:
    import onnx_ir as ir

Floats = NDArray[np.float32]
# A float32's sign, exponent and five bits of mantissa: bins that do not depend on the data, 3% wide.
_BIN_SHIFT = 18
_NUM_BINS = 1 << (32 - _BIN_SHIFT)
# Below this many of 256 levels for 99.8% of the values, a tensor's range is called stretched.
_FEW_LEVELS = 32


@dataclass(frozen=True)
class TensorRange:
    """The range that a tensor's quantised values cover.

    Attributes:
        low, high: the range, which always holds 0.
        count: values seen.
        clipped: share of the values outside, 0 to 1.
        bulk_levels: how many of 256 levels the middle 99.8% of the values get.
        finite: False where NaN or infinity was seen.
        fell_back: True where a percentile would have left nothing but 0, and the range is min-max.
    """

    low: float
    high: float
    count: int
    clipped: float
    bulk_levels: int
    finite: bool
    fell_back: bool = False


class _Statistics:
    """Running extremes and counts of one tensor."""

    def __init__(self) -> None:
        self.low, self.high, self.count, self.finite = np.inf, -np.inf, 0, True
        self.bins = np.zeros(_NUM_BINS, dtype=np.int64)

    def add(self, values: AnyArray) -> None:
        flat = np.ascontiguousarray(values, dtype=np.float32).reshape(-1)
        finite = np.isfinite(flat)
        if not finite.all():
            self.finite = False
            flat = flat[finite]
        if flat.size:
            self.low, self.high = min(self.low, float(flat.min())), max(self.high, float(flat.max()))
            self.count += flat.size
            self.bins += np.bincount(flat.view(np.uint32) >> _BIN_SHIFT, minlength=_NUM_BINS)

    def bulk(self, outside: float) -> tuple[float, float]:
        """Returns the range of the values without `outside` of them, half at each end, to a bin's width."""
        half = _NUM_BINS // 2
        # From the most negative to the most positive: the negative half counts away from 0.
        counts = np.concatenate([self.bins[half:][::-1], self.bins[:half]])
        edges = np.arange(1, half + 1, dtype=np.uint32)
        upper = (np.minimum(edges << _BIN_SHIFT, np.uint32(0x7F7FFFFF))).view(np.float32).astype(np.float64)
        values = np.concatenate([-upper[::-1], upper])
        ahead = np.cumsum(counts)
        drop = outside / 2 * self.count
        first = int(np.searchsorted(ahead, drop, side="right"))
        last = int(np.searchsorted(ahead, self.count - drop, side="left"))
        return max(self.low, float(values[first])), min(self.high, float(values[min(last, values.size - 1)]))


def collect_ranges(
    model: ir.Model, names: Sequence[str], samples: Samples, options: CalibrationOptions
) -> dict[str, TensorRange]:
    """Runs the fp32 graph on all samples and returns each tensor's range.

    A tensor without a single value (an empty one, or one that no sample reached) is absent from the result.
    """
    seen: dict[str, _Statistics] = {}
    for arrays in observe(model, names, samples):
        for name, array in arrays.items():
            if array.size:
                seen.setdefault(name, _Statistics()).add(array)
    seen = {n: s for n, s in seen.items() if s.count}
    exact: dict[str, tuple[float, float, float]] = {}
    if options.method == "percentile" and options.percentile < 100:
        exact = _percentiles(model, seen, samples, (100 - options.percentile) / 200)
    ranges = {}
    for name, found in seen.items():
        low, high, clipped = exact.get(name, (found.low, found.high, 0.0))
        low, high = min(low, 0.0), max(high, 0.0)
        # Rare values among zeros (a sparse activation) are all there is to keep: a range of 0 would clip each of them.
        if fell_back := low == high and found.low != found.high:
            low, high, clipped = min(found.low, 0.0), max(found.high, 0.0), 0.0
        step = (high - low) / 255 or 1.0
        bulk_low, bulk_high = (float(np.clip(v, low, high)) for v in found.bulk(0.002))
        levels = round(bulk_high / step) - round(bulk_low / step) + 1
        ranges[name] = TensorRange(low, high, found.count, clipped, levels, found.finite, fell_back)
    return ranges


def _percentiles(
    model: ir.Model, seen: Mapping[str, _Statistics], samples: Samples, tail: float
) -> dict[str, tuple[float, float, float]]:
    """Returns (low, high, clipped share) with exactly `tail` of the values beyond each end, interpolated.

    Only the extreme values are kept, as many as the tail holds: the result is what sorting all would give.
    """
    keep = {n: int(np.ceil(s.count * tail)) + 2 for n, s in seen.items()}
    ends: dict[str, tuple[Floats, Floats]] = {}
    for arrays in observe(model, list(seen), samples):
        for name, array in arrays.items():
            flat = np.asarray(array, dtype=np.float32).reshape(-1)
            flat = flat[np.isfinite(flat)]
            bottom, top = ends.get(name, (flat[:0], flat[:0]))
            count = keep[name]
            if flat.size > 2 * count:
                # Only the ends are ever sorted.
                flat = np.partition(flat, (count, flat.size - count))
                low_end, high_end = flat[:count], flat[-count:]
            else:
                low_end = high_end = flat
            ends[name] = (
                np.sort(np.concatenate([bottom, low_end]))[:count],
                np.sort(np.concatenate([top, high_end]))[-count:],
            )
    result = {}
    for name, (bottom, top) in ends.items():
        count = seen[name].count
        rank = (count - 1) * tail
        low = float(np.interp(rank, np.arange(bottom.size), bottom))
        high = float(np.interp(rank, np.arange(top.size), top[::-1]))
        outside = int((bottom < min(low, 0.0)).sum() + (top > max(high, 0.0)).sum())
        result[name] = (low, high, outside / count)
    return result


def range_notes(ranges: Mapping[str, TensorRange], options: CalibrationOptions) -> tuple[str, ...]:
    """Returns what the user should know about the ranges: clipped shares, and ranges that outliers stretched."""
    clipped = {n: r for n, r in ranges.items() if r.clipped}
    notes = []
    if clipped:
        worst = max(clipped, key=lambda n: clipped[n].clipped)
        notes.append(
            f"percentile {options.percentile:g} clips values of {len(clipped)} tensors; the most of '{worst}': "
            f"{clipped[worst].clipped:.3%}"
        )
    fell_back = sorted(n for n, r in ranges.items() if r.fell_back)
    if fell_back:
        notes.append(
            f"percentile {options.percentile:g} would clip all that is not 0 of {len(fell_back)} tensor(s), such as "
            f"'{fell_back[0]}': their ranges are min-max"
        )
    stretched = {n: r for n, r in ranges.items() if r.bulk_levels < _FEW_LEVELS and r.high > r.low}
    if stretched and options.method == "minmax":
        worst = min(stretched, key=lambda n: stretched[n].bulk_levels)
        found = stretched[worst]
        notes.append(
            f"outliers stretch the range of {len(stretched)} tensors; the most '{worst}', {found.low:.4g} to "
            f"{found.high:.4g}: 99.8% of its values share {found.bulk_levels} of 256 levels. Calibration method "
            "percentile clips outliers"
        )
    return tuple(notes)
