"""fp16 and bf16: what must stay in fp32, what is risky, and the fewest of the risky that need it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from compiler.errors import ModelRefused
from compiler.precision.accuracy import agreement
from compiler.precision.casts import insert_casts
from compiler.precision.emulate import emulated
from compiler.precision.graph import drop_unused_initializers, prepare
from compiler.precision.holds import BF16, FP16, HalfType, low_variables, static_holds
from compiler.precision.int8 import judge_samples
from compiler.precision.magnitudes import range_holds
from compiler.precision.observe import Samples, run_outputs
from compiler.precision.result import CalibrationOptions, HeldNode, PrecisionResult
from compiler.precision.schemas import schema_of
from compiler.precision.search import hold_back

if TYPE_CHECKING:
    import onnx_ir as ir

# Held back first where the tolerance is not met: they amplify rounding, or add many values. Then the others, from
# the end of the graph, where an error is not averaged out any more.
_RISKY = ("Exp", "Log", "Pow", "Softmax", "LogSoftmax", "Div", "Reciprocal", "Sqrt", "LayerNormalization")


def convert_half(model: ir.Model, precision: str, samples: Samples, options: CalibrationOptions) -> PrecisionResult:
    """Converts a graph to fp16 or bf16; its inputs and outputs keep their types.

    Raises:
        ModelRefused: the tolerance is not reached even with the search's last attempt.
    """
    half = FP16 if precision == "fp16" else BF16
    base = prepare(model)
    reasons = static_holds(base, half)
    for name, reason in range_holds(base, half, samples).items():
        reasons.setdefault(name, reason)
    nodes = {n.name or "": n for n in base.graph}
    free = [name for name, node in nodes.items() if name not in reasons and _is_convertible(base, node, half)]
    judged = judge_samples(samples)
    want = run_outputs(base, judged)

    def build(back: Sequence[str]) -> tuple[ir.Model, dict[str, int]]:
        copy = base.clone()
        counts = insert_casts(copy, half, {*reasons, *back})
        drop_unused_initializers(copy.graph)
        return copy, counts

    def judge(back: Sequence[str]) -> float:
        return agreement(want, run_outputs(emulated(build(back)[0]), judged))

    threshold = options.threshold(precision)
    found = hold_back(judge, _ranked(free, nodes), threshold, options.max_runs)
    if not found.reached:
        raise ModelRefused(
            f"precision {precision}: agreement with fp32 is {found.score:.6f} at best, {threshold:g} is asked "
            f"({found.runs} graphs tried, {len(reasons) + len(found.held)} of {len(nodes)} nodes held in fp32)",
            hint="take a lower min_cosine or a larger max_runs, or precision fp32",
        )
    for name in found.held:
        reasons[name] = (
            f"costs accuracy: held among {len(found.held)} nodes that bring the agreement to {found.score:.6f}"
        )
    result, counts = build(found.held)
    held = tuple(
        HeldNode(name, node.op_type, reasons[name])
        for name, node in nodes.items()
        if name in reasons and _has_float(node)
    )
    notes = [
        f"agreement with fp32 {found.score:.6f} on {len(judged)} samples, each node's result rounded to {precision}; "
        f"{found.runs} graphs tried"
    ]
    return PrecisionResult(result, precision, held, tuple(notes), {**counts, "held_nodes": len(held)}, found.score)


def _ranked(free: Sequence[str], nodes: dict[str, ir.Node]) -> list[str]:
    risky = [n for n in free if nodes[n].op_type in _RISKY or nodes[n].op_type.startswith("Reduce")]
    chosen = set(risky)
    return [*risky, *(n for n in reversed(free) if n not in chosen)]


def _is_convertible(model: ir.Model, node: ir.Node, half: HalfType) -> bool:
    schema = schema_of(node, model.opset_imports)
    return schema is not None and bool(low_variables(node, schema, half))


def _has_float(node: ir.Node) -> bool:
    from onnx_ir import DataType

    return any(v is not None and v.dtype in (DataType.FLOAT, None) for v in (*node.inputs, *node.outputs))
