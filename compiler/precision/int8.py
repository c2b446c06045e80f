"""int8, static and dynamic: which nodes, their ranges, and the few that are held back for accuracy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from compiler.dtypes import AnyArray
from compiler.errors import ModelRefused
from compiler.precision.accuracy import agreement
from compiler.precision.calibration import collect_ranges, range_notes
from compiler.precision.dynamic import DYNAMIC_OPS, quantize_dynamic
from compiler.precision.graph import drop_unused_initializers, prepare
from compiler.precision.observe import Samples, run_outputs
from compiler.precision.quantize import Quantizer, scheme_for, tensors_to_calibrate, weight_of
from compiler.precision.result import CalibrationOptions, HeldNode, PrecisionResult
from compiler.precision.search import hold_back
from compiler.precision.sensitivity import local_errors
from compiler.precision.support import cpu_flags, weight_bits

if TYPE_CHECKING:
    import onnx_ir as ir

# Per-channel scales came with opset 13.
MIN_OPSET = 13
# The search runs each graph on so many samples; ranges are taken over all.
NUM_JUDGE_SAMPLES = 8


def quantize_static(model: ir.Model, target: str, samples: Samples, options: CalibrationOptions) -> PrecisionResult:
    """Writes Q/DQ pairs around Conv, MatMul and Gemm nodes with constant weights (see `quantize.Scheme`)."""
    base = _prepared(model, "int8")
    bits, notes = weight_bits(target, options.reduce_range, cpu_flags())
    scheme = scheme_for(target, bits)
    ranges = collect_ranges(base, tensors_to_calibrate(base.graph, scheme), samples, options)
    candidates: list[str] = []
    held: dict[str, HeldNode] = {}
    for node in base.graph:
        if weight_of(node) is None:
            continue
        data = node.inputs[0]
        found = ranges.get(data.name or "") if data is not None else None
        if found is not None and found.finite:
            candidates.append(node.name or "")
        else:
            what = "holds NaN or infinity" if found is not None else "has no calibration data"
            reason = f"its input '{data.name if data is not None else ''}' {what}"
            held[node.name or ""] = HeldNode(node.name or "", node.op_type, reason)
    judged = judge_samples(samples)

    def rank() -> dict[str, float]:
        return local_errors(base, candidates, ranges, scheme, judged)

    def build(names: Sequence[str]) -> tuple[ir.Model, dict[str, int]]:
        copy = base.clone()
        quantizer = Quantizer(copy.graph, ranges, scheme)
        quantizer.quantize(frozenset(names))
        return copy, quantizer.counts

    notes = (*notes, *range_notes({n: r for n, r in ranges.items() if r.finite}, options))
    return _search(base, "int8", candidates, held, rank, build, judged, options, notes)


def quantize_dynamically(model: ir.Model, samples: Samples, options: CalibrationOptions) -> PrecisionResult:
    """Replaces MatMul and Gemm nodes with constant weights by integer products (see `dynamic`)."""
    base = _prepared(model, "int8_dynamic")
    bits, notes = weight_bits("onnxruntime", options.reduce_range, cpu_flags())
    candidates = [n.name or "" for n in base.graph if n.op_type in DYNAMIC_OPS and weight_of(n)]
    judged = judge_samples(samples)

    def rank() -> dict[str, float]:
        # The static error is a fair order for the dynamic one too: it is the same weights and the same data.
        minmax = CalibrationOptions()
        scheme = scheme_for("onnxruntime", bits)
        ranges = collect_ranges(base, tensors_to_calibrate(base.graph, scheme), judged, minmax)
        known = [n for n in candidates if _input_name(base, n) in ranges]
        errors = local_errors(base, known, ranges, scheme, judged)
        return {n: errors.get(n, 0.0) for n in candidates}

    def build(names: Sequence[str]) -> tuple[ir.Model, dict[str, int]]:
        copy = base.clone()
        return copy, quantize_dynamic(copy.graph, frozenset(names), bits)

    return _search(base, "int8_dynamic", candidates, {}, rank, build, judged, options, notes)


def _search(
    base: ir.Model,
    precision: str,
    candidates: Sequence[str],
    held: dict[str, HeldNode],
    rank: Callable[[], Mapping[str, float]],
    build: Callable[[Sequence[str]], tuple[ir.Model, dict[str, int]]],
    samples: Samples,
    options: CalibrationOptions,
    notes: tuple[str, ...],
) -> PrecisionResult:
    """Converts as many candidates as the tolerance allows and reports the others.

    Raises:
        ModelRefused: nothing can be converted, or the tolerance is met only with everything in fp32.
    """
    if not candidates:
        raise ModelRefused(
            f"precision {precision}: no node of the graph can be int8"
            + "".join(f"; {h.name} ({h.op_type}): {h.reason}" for h in list(held.values())[:3]),
            hint="int8 converts Conv, MatMul and Gemm nodes with constant weights and calibrated inputs; take fp32",
        )
    want = run_outputs(base, samples)
    errors: dict[str, float] = {}
    ranked: list[str] = []

    def judge(back: Sequence[str]) -> float:
        model, _ = build([n for n in candidates if n not in set(back)])
        return agreement(want, run_outputs(model, samples))

    threshold = options.threshold(precision)
    score, runs = judge(()), 1
    first = score
    back: tuple[str, ...] = ()
    if score < threshold and options.max_runs > 1:
        # Ranked only where it is needed: the ranking runs every node twice.
        errors.update(rank())
        ranked = sorted(candidates, key=lambda n: -errors[n])
        # Everything in fp32 is no int8 graph: the last candidate always stays.
        result = hold_back(lambda k: score if not k else judge(k), ranked[:-1], threshold, options.max_runs)
        back, score, runs = result.held, result.score, result.runs
    if score < threshold:
        raise ModelRefused(
            f"precision {precision}: agreement with fp32 is {score:.4f} at best, {threshold:g} is asked "
            f"({runs} graphs tried, {len(back)} of {len(candidates)} nodes held in fp32)"
            + (f". Notes: {'; '.join(notes)}" if notes else ""),
            hint="more calibration data, method percentile, a larger max_runs, a lower min_cosine, or precision fp32",
        )
    model, counts = build([n for n in candidates if n not in set(back)])
    drop_unused_initializers(model.graph)
    types = {n.name or "": n.op_type for n in base.graph}
    for name in back:
        held[name] = HeldNode(
            name,
            types[name],
            f"costs accuracy: in int8 alone it loses {errors[name]:.2%} of its output's power; agreement with fp32 is "
            f"{first:.5f} with no node held, {score:.5f} with these {len(back)}",
        )
    order = {n.name: i for i, n in enumerate(base.graph)}
    return PrecisionResult(
        model,
        precision,
        tuple(sorted(held.values(), key=lambda h: order[h.name])),
        (*notes, f"agreement with fp32 {score:.5f} on {len(samples)} samples, {runs} graphs tried"),
        {**counts, "held_nodes": len(held)},
        score,
    )


def _prepared(model: ir.Model, precision: str) -> ir.Model:
    base = prepare(model)
    opset = base.opset_imports.get("", 0)
    if opset < MIN_OPSET:
        raise ModelRefused(
            f"precision {precision}: the graph is opset {opset}, scales per channel need {MIN_OPSET}",
            hint=f"export at opset {MIN_OPSET} or later",
        )
    return base


def judge_samples(samples: Samples) -> list[Mapping[str, AnyArray]]:
    """Returns evenly spread samples, so that a sorted set is not judged by its first part."""
    step = max(1, len(samples) // NUM_JUDGE_SAMPLES)
    return list(samples[::step])[:NUM_JUDGE_SAMPLES]


def _input_name(model: ir.Model, node_name: str) -> str:
    return next((n.inputs[0].name or "" for n in model.graph if n.name == node_name and n.inputs[0] is not None), "")
