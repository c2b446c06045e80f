"""The inputs on which a model is judged: every corner of its dims, its values and its padding. Pure and seeded."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

import numpy as np

from compiler.dtypes import AnyArray
from compiler.spec import ModelSpec
from compiler.tensors import BATCH_DIM, InputSpec


@dataclass(frozen=True)
class Case:
    """One set of inputs.

    Attributes:
        name: short and unique, names the sizes and what is special.
        sizes: the size of each dim.
        inputs: arrays by input name.
    """

    name: str
    sizes: dict[str, int]
    inputs: dict[str, AnyArray]


def export_sizes(spec: ModelSpec) -> dict[str, int]:
    """Returns the sizes to trace with: distinct, at least 2 where the range allows.

    Exporters treat 0 and 1 as constants, and two equal sizes as one dim.
    """
    taken: set[int] = {s for t in spec.inputs for s in t.shape if isinstance(s, int)}
    sizes = {}
    for dim in spec.dims.values():
        candidates = [s for s in range(max(3, dim.min), dim.max + 1)][:64]
        free = [s for s in candidates if s not in taken]
        sizes[dim.name] = free[0] if free else dim.max
        taken.add(sizes[dim.name])
    return sizes


def larger_sizes(spec: ModelSpec) -> dict[str, int]:
    """Returns other sizes to trace with: odd, distinct, as large as the dims allow up to about 60."""
    taken: set[int] = {s for t in spec.inputs for s in t.shape if isinstance(s, int)}
    sizes = {}
    for dim in spec.dims.values():
        candidates = range(min(dim.max, max(dim.min, 3) + 60), dim.min - 1, -1)
        free = [s for s in candidates if s % 2 and s not in taken]
        sizes[dim.name] = free[0] if free else dim.max
        taken.add(sizes[dim.name])
    return sizes


def parity_cases(spec: ModelSpec) -> list[Case]:
    """Returns the cases that a shipped file must pass: corners, the interior, padded rows, extreme values."""
    low = {d.name: d.min for d in spec.dims.values()}
    best = {d.name: d.opt for d in spec.dims.values()}
    high = {d.name: d.max for d in spec.dims.values()}
    inner = {d.name: _inner(d.min, d.max, 0.37) for d in spec.dims.values()}
    odd = {d.name: _inner(d.min, d.max, 0.11) for d in spec.dims.values()}
    sizes: dict[tuple[int, ...], tuple[str, dict[str, int]]] = {}
    plan = [("smallest", low), ("best", best), ("largest", high), ("inner", inner), ("odd", odd)]
    for name in spec.dims:
        # One dim at its smallest while the others are large, and the reverse: a baked size hides in equal ones.
        plan.append((f"{name}_smallest", {**best, name: low[name]}))
        plan.append((f"{name}_largest", {**low, name: high[name]}))
    for label, chosen in plan:
        sizes.setdefault(tuple(chosen.values()), (label, chosen))
    cases = [_case(spec, label, chosen, padded=False) for label, chosen in sizes.values()]
    if any(t.values == "padding_mask" for t in spec.inputs):
        padded = [(n, s) for n, s in sizes.values() if n in ("best", "inner", "odd", "largest")]
        cases += [_case(spec, f"{label}_padded", chosen, padded=True) for label, chosen in padded]
    cases += [_case(spec, f"extreme_{end}", inner, padded=True, extreme=end) for end in ("low", "high")]
    return cases


def _inner(low: int, high: int, part: float) -> int:
    """Returns an interior size, odd where there is room: even sizes hide halving mistakes."""
    size = low + int((high - low) * part)
    return size + 1 if size % 2 == 0 and size + 1 <= high else size


def precision_cases(spec: ModelSpec) -> list[Case]:
    """Returns cheap cases that show a lower precision's ranges and rounding: a search runs them many times.

    They have the padding and the extreme values of the parity cases, at the same inner sizes but one row in place of a
    batch of equal ones, and each dim once at its largest, where sums are longest. No reference belongs to them: they
    are judged against the fp32 graph.
    """
    low = {d.name: d.min for d in spec.dims.values()}
    odd = {d.name: _inner(d.min, d.max, 0.11) for d in spec.dims.values()}
    one = {d.name: d.min if d.name == BATCH_DIM else _inner(d.min, d.max, 0.37) for d in spec.dims.values()}
    cases = [_case(spec, "precision_odd", odd, padded=True), _case(spec, "precision_smallest", low, padded=False)]
    cases += [_case(spec, f"precision_{end}", one, padded=False, extreme=end) for end in ("low", "high")]
    longest = [{**low, dim.name: dim.max} for dim in spec.dims.values() if dim.name != BATCH_DIM]
    cases += [_case(spec, "precision_longest", sizes, padded=False) for sizes in longest]
    return cases


def best_case(spec: ModelSpec) -> Case:
    """Returns the case at every dim's opt: what timings and costs are given for."""
    return _case(spec, "opt", {name: dim.opt for name, dim in spec.dims.items()}, padded=False)


def make_case(spec: ModelSpec, name: str, sizes: dict[str, int], *, padded: bool) -> Case:
    """Returns a case of the given sizes with random values."""
    return _case(spec, name, sizes, padded=padded)


def _case(spec: ModelSpec, label: str, sizes: dict[str, int], *, padded: bool, extreme: str = "") -> Case:
    shown = ",".join(f"{n}={s}" for n, s in sizes.items())
    # crc32, not hash(): the same values in every process.
    rng = np.random.default_rng(zlib.crc32(f"{spec.name}/{label}".encode()))
    inputs = {t.name: _values(t, sizes, rng, padded, extreme) for t in spec.inputs}
    return Case(f"{label}[{shown}]" if shown else label, dict(sizes), inputs)


def _values(tensor: InputSpec, sizes: dict[str, int], rng: np.random.Generator, padded: bool, extreme: str) -> AnyArray:
    shape = tuple(sizes[s] if isinstance(s, str) else s for s in tensor.shape)
    if tensor.values == "padding_mask":
        return _padding_mask(shape, rng, padded).astype(tensor.dtype.numpy)
    low, high = tensor.range
    values: AnyArray
    ends = _whole_range(tensor)
    if extreme:
        low, high = _end_of_range(tensor, extreme)
    if extreme and tensor.dtype.name == "bool":
        values = np.full(shape, extreme == "high")
    elif tensor.dtype.is_integer:
        bounds = max(int(low), int(ends[0])), min(int(high), int(ends[1]))
        values = rng.integers(*bounds, shape, endpoint=True, dtype=tensor.dtype.numpy)  # type: ignore[arg-type]
    elif tensor.dtype.name == "bool":
        values = rng.integers(0, 2, shape).astype(np.bool_)
    else:
        values = rng.uniform(low, high, shape).astype(tensor.dtype.numpy)
    if extreme and values.size:
        values.flat[0] = ends[extreme == "high"]
    return values


def _whole_range(tensor: InputSpec) -> tuple[float, float]:
    """Returns the smallest and largest value; a bound of int64 may have been rounded up on its way through a float."""
    low, high = tensor.range
    if tensor.dtype.is_integer:
        limits = np.iinfo(tensor.dtype.numpy)  # type: ignore[type-var]
        return max(int(low), int(limits.min)), min(int(high), int(limits.max))
    return low, high


def _end_of_range(tensor: InputSpec, extreme: str) -> tuple[float, float]:
    """Returns the lowest or highest sixteenth of a range.

    Not one value everywhere: that would make every comparison inside the model a tie (which of equal scores comes
    first?) and every variance 0, whose rounding a normalisation multiplies. Neither says anything about the file.
    """
    low, high = tensor.range
    part = low + (high - low) / 16 if extreme == "low" else high - (high - low) / 16
    if tensor.dtype.is_integer:
        part = math.floor(part) if extreme == "low" else math.ceil(part)
    return (low, part) if extreme == "low" else (part, high)


def _padding_mask(shape: tuple[int, ...], rng: np.random.Generator, padded: bool) -> AnyArray:
    """Ones then zeros along the last axis; with `padded`, the first row is full and the last has one 1."""
    length = shape[-1]
    rows = int(np.prod(shape[:-1]))
    valid = np.full(rows, length)
    if padded:
        valid = rng.integers(1, length, rows, endpoint=True)
        valid[-1] = 1
        if rows > 1:
            valid[0] = length
    return (np.arange(length) < valid[:, None]).reshape(shape)
