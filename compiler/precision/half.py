"""fp16 and bf16: what must stay in fp32, and the fewest of the others that need it for accuracy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING

from compiler.errors import ModelRefused
from compiler.precision.casts import insert_casts
from compiler.precision.costs import node_work, shares
from compiler.precision.emulate import emulated
from compiler.precision.graph import drop_unused_initializers, prepare
from compiler.precision.holds import BF16, FP16, HalfType, low_variables, static_holds
from compiler.precision.judged import Judge, judge_samples
from compiler.precision.magnitudes import observe_ranges
from compiler.precision.observe import Samples
from compiler.precision.result import CalibrationOptions, HeldNode, PrecisionResult, Share
from compiler.precision.schemas import schema_of
from compiler.precision.search import SearchResult, find_holds

if TYPE_CHECKING:
    import onnx_ir as ir


def convert_half(
    model: ir.Model, precision: str, samples: Samples, edges: Samples, options: CalibrationOptions
) -> PrecisionResult:
    """Converts a graph to fp16 or bf16; its inputs and outputs keep their types.

    Raises:
        ModelRefused: the tolerance is not reached even with the search's last attempt.
    """
    half = FP16 if precision == "fp16" else BF16
    base = prepare(model)
    observed = observe_ranges(base, half, [*samples, *edges])
    reasons = {n: r for n, r in static_holds(base, half).items() if n not in observed.harmless_epsilons}
    for name, reason in observed.holds.items():
        reasons.setdefault(name, reason)
    nodes = {n.name or "": n for n in base.graph}
    free = [name for name, node in nodes.items() if name not in reasons and _is_convertible(base, node, half)]
    if not free:
        raise _nothing_to_convert(precision, nodes, reasons)
    judged = [*judge_samples(base, samples), *edges]

    def build(back: Set[str]) -> tuple[ir.Model, dict[str, int]]:
        copy = base.clone()
        counts = insert_casts(copy, half, reasons.keys() | back)
        drop_unused_initializers(copy.graph)
        return copy, counts

    threshold = options.threshold(precision)
    # Everything in fp32 is no half-precision graph: one node always stays.
    judge = Judge(base, lambda back: emulated(build(back)[0]), judged, threshold)
    found = find_holds(judge, judge.probe, free, threshold, options.max_runs, keep_one=True, known=options.known)
    if not found.reached:
        raise ModelRefused(
            f"precision {precision}: agreement with fp32 is {found.score:.6f} at best, {threshold:g} is asked "
            f"({found.runs} graphs tried, {len(reasons) + len(found.held)} of {len(nodes)} nodes held in fp32)",
            hint="take a lower min_cosine or a larger max_runs, or precision fp32",
        )
    result, counts = build(frozenset(found.held))
    work = shares(node_work(base, judged[0]))
    held = _held_nodes(nodes, {**reasons, **_costly(found, precision)}, work)
    notes = (
        f"agreement with fp32 {found.score:.6f} on {len(judged)} samples, each node's result rounded to {precision}; "
        f"{found.runs} graphs tried; {found.note()}",
        *observed.notes,
        *_cost_notes(held),
    )
    return PrecisionResult(result, precision, held, notes, {**counts, "held_nodes": len(held)}, found.score, found)


def _nothing_to_convert(precision: str, nodes: Mapping[str, ir.Node], reasons: Mapping[str, str]) -> ModelRefused:
    """Returns the refusal of a graph without a node that could be half: it would ship in fp32 under another name."""
    held = [f"{nodes[n].op_type} '{n}': {reason}" for n, reason in reasons.items() if _has_float(nodes[n])]
    types = sorted({v.dtype.name.lower() for node in nodes.values() for v in node.outputs if v.dtype is not None})
    found = "; ".join(held[:3]) or f"its values are {', '.join(types) or 'of no known type'}, none is float32"
    return ModelRefused(
        f"precision {precision}: no node of the graph can be {precision}: {found}",
        hint="precision fp32 keeps the types that the graph has",
    )


def _costly(found: SearchResult, precision: str) -> dict[str, str]:
    reason = "costs accuracy: in {} alone it takes about {:.2g} of the agreement ({:.6f} with no node held)"
    return {n: reason.format(precision, found.losses[n], found.first) for n in found.held}


def _held_nodes(
    nodes: Mapping[str, ir.Node], reasons: Mapping[str, str], work: Mapping[str, Share]
) -> tuple[HeldNode, ...]:
    return tuple(
        HeldNode(name, node.op_type, reasons[name], work[name])
        for name, node in nodes.items()
        if name in reasons and _has_float(node)
    )


def _cost_notes(held: Sequence[HeldNode]) -> tuple[str, ...]:
    if not held:
        return ()
    total = Share(sum(h.share.flops for h in held), sum(h.share.bytes for h in held))
    return (
        f"what the {len(held)} held nodes cost is estimated, a CPU has no half-precision kernels to time it with: "
        f"they do {total}",
    )


def _is_convertible(model: ir.Model, node: ir.Node, half: HalfType) -> bool:
    schema = schema_of(node, model.opset_imports)
    return schema is not None and bool(low_variables(node, schema, half))


def _has_float(node: ir.Node) -> bool:
    from onnx_ir import DataType

    return any(v is not None and v.dtype in (DataType.FLOAT, None) for v in (*node.inputs, *node.outputs))
