"""int8, static and dynamic: which nodes, their ranges, and the few that are held back for accuracy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from typing import TYPE_CHECKING

from compiler.calibration_spec import METHODS
from compiler.errors import ModelRefused
from compiler.precision.calibration import collect_ranges, range_notes
from compiler.precision.costs import compare_graphs, node_work, shares
from compiler.precision.dynamic import DYNAMIC_OPS, quantize_dynamic
from compiler.precision.graph import drop_unused_initializers, prepare
from compiler.precision.judged import Judge, judge_samples
from compiler.precision.observe import Samples
from compiler.precision.quantize import Quantizer, tensors_to_calibrate
from compiler.precision.result import CalibrationOptions, HeldNode, PrecisionResult
from compiler.precision.search import SearchResult, find_holds
from compiler.precision.smoothing import find_smoothing
from compiler.precision.support import cpu_flags, weight_bits
from compiler.precision.weights import Smoothing, scheme_for, weight_of

if TYPE_CHECKING:
    import onnx_ir as ir

# Per-channel scales came with opset 13.
MIN_OPSET = 13

# Writes the named nodes into a copy of the graph in int8; returns it with counts.
Build = Callable[[Set[str]], tuple["ir.Model", dict[str, int]]]


def quantize_static(
    model: ir.Model, target: str, samples: Samples, edges: Samples, options: CalibrationOptions
) -> PrecisionResult:
    """Writes Q/DQ pairs around Conv, MatMul and Gemm nodes with constant weights (see `quantize.Scheme`)."""
    base = _prepared(model, "int8")
    bits, notes = weight_bits(target, options.reduce_range, cpu_flags())
    scheme = scheme_for(target, bits)
    every = [*samples, *edges]
    ranges = collect_ranges(base, tensors_to_calibrate(base.graph, scheme), every, options)
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

    smoothing: Mapping[str, Smoothing] = {}
    if options.method == METHODS[0]:
        # A percentile clips the outliers; smoothing keeps them.
        smoothing = find_smoothing(base, candidates, every, scheme.weight_bits)

    def build(names: Set[str]) -> tuple[ir.Model, dict[str, int]]:
        copy = base.clone()
        quantizer = Quantizer(copy.graph, ranges, scheme, smoothing)
        quantizer.quantize(names)
        return copy, quantizer.counts

    notes += _smoothing_note(smoothing)
    told = {n: r for n, r in ranges.items() if r.finite and n not in smoothing}
    notes += range_notes(told, options)
    judged = [*judge_samples(base, samples), *edges]
    return _search(base, "int8", target, candidates, held, build, judged, options, notes)


def quantize_dynamically(
    model: ir.Model, samples: Samples, edges: Samples, options: CalibrationOptions
) -> PrecisionResult:
    """Replaces MatMul and Gemm nodes with constant weights by integer products (see `dynamic`)."""
    base = _prepared(model, "int8_dynamic")
    bits, notes = weight_bits("onnxruntime", options.reduce_range, cpu_flags())
    candidates = [n.name or "" for n in base.graph if n.op_type in DYNAMIC_OPS and weight_of(n)]
    smoothing = find_smoothing(base, candidates, [*samples, *edges], bits)
    notes += _smoothing_note(smoothing)

    def build(names: Set[str]) -> tuple[ir.Model, dict[str, int]]:
        copy = base.clone()
        return copy, quantize_dynamic(copy.graph, names, bits, smoothing)

    judged = [*judge_samples(base, samples), *edges]
    return _search(base, "int8_dynamic", "onnxruntime", candidates, {}, build, judged, options, notes)


def _smoothing_note(smoothing: Mapping[str, Smoothing]) -> tuple[str, ...]:
    if not smoothing:
        return ()
    return (f"outlier channels of {len(smoothing)} tensor(s) are moved into the weights that read them",)


def _search(
    base: ir.Model,
    precision: str,
    target: str,
    candidates: Sequence[str],
    held: dict[str, HeldNode],
    build: Build,
    judged: Samples,
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
    every = frozenset(candidates)
    threshold = options.threshold(precision)
    judge = Judge(base, lambda back: build(every - back)[0], judged, threshold)
    # Everything in fp32 is no int8 graph: one candidate always stays.
    found = find_holds(judge, judge.probe, candidates, threshold, options.max_runs, keep_one=True, known=options.known)
    if not found.reached:
        raise ModelRefused(
            f"precision {precision}: agreement with fp32 is {found.score:.4f} at best, {threshold:g} is asked "
            f"({found.runs} graphs tried, {len(found.held)} of {len(candidates)} nodes held in fp32)"
            + (f". Notes: {'; '.join(notes)}" if notes else ""),
            hint="more calibration data, method percentile, a larger max_runs, a lower min_cosine, or precision fp32",
        )
    model, counts = build(every - set(found.held))
    drop_unused_initializers(model.graph)
    work = shares(node_work(base, judged[0]))
    all_held = {**held, **_held_by_search(base, found)}
    notes = (
        *notes,
        f"agreement with fp32 {found.score:.5f} on {len(judged)} samples, {found.runs} graphs tried; {found.note()}",
        *_cost_note(model, build, every, found, target, judged),
    )
    ordered = tuple(
        replace(all_held[name], share=work[name]) for node in base.graph if (name := node.name or "") in all_held
    )
    return PrecisionResult(model, precision, ordered, notes, {**counts, "held_nodes": len(ordered)}, found.score, found)


def _held_by_search(base: ir.Model, found: SearchResult) -> dict[str, HeldNode]:
    types = {n.name or "": n.op_type for n in base.graph}
    reason = "costs accuracy: in int8 alone it takes about {:.2g} of the agreement ({:.5f} with no node held)"
    return {n: HeldNode(n, types[n], reason.format(found.losses[n], found.first)) for n in found.held}


def _cost_note(
    model: ir.Model, build: Build, every: frozenset[str], found: SearchResult, target: str, judged: Samples
) -> tuple[str, ...]:
    """Says what the nodes that the search holds cost in speed, measured where this machine can."""
    if not found.held:
        return ()
    sample = max(judged, key=lambda s: sum(a.size for a in s.values()))
    without, _ = build(every)
    drop_unused_initializers(without.graph)
    timed = compare_graphs(model, without, target, sample)
    if timed is None:
        return (f"what the held nodes cost is estimated by their part of the work: {target} cannot run here",)
    shapes = ", ".join(f"{n} {list(a.shape)}" for n, a in sample.items())
    return (
        f"what the held nodes cost in speed, measured here on {target} at {shapes}: {timed.first_ms:.2f} ms with them, "
        f"{timed.second_ms:.2f} ms with every node in int8, {timed}",
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
