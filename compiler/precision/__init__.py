"""Typed mixed precision: fp16, bf16 and int8 written into the graph, one implementation for all targets.

    model (fp32) -> which nodes may change  -> insert casts or Q/DQ -> judge on samples -> hold back what costs
                    schemas, ranges, epsilons   casts.py, quantize.py   accuracy.py        search.py

No engine is built here, and no flag of an engine is relied on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from compiler.errors import UsageError
from compiler.precision.calibration_data import (
    calibration_from_folder,
    calibration_samples,
    checked_sample,
    samples_from,
)
from compiler.precision.observe import Samples
from compiler.precision.result import CalibrationOptions, HeldNode, PrecisionResult, held_lines
from compiler.precision.support import PRECISIONS, refuse_unsupported, runnable, supported, warnings

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = [
    "PRECISIONS",
    "CalibrationOptions",
    "HeldNode",
    "PrecisionResult",
    "calibration_from_folder",
    "calibration_samples",
    "convert",
    "held_lines",
    "refuse_unsupported",
    "runnable",
    "samples_from",
    "supported",
]

_DEFAULT = CalibrationOptions()


def convert(
    model: ir.Model,
    precision: str,
    target: str,
    samples: Samples,
    *,
    edges: Samples = (),
    calibration: CalibrationOptions = _DEFAULT,
) -> PrecisionResult:
    """Returns a copy of the graph in the asked precision, judged on the samples.

    Args:
        model: an fp32 graph; it is not changed. For fp16 and bf16 before fusions, for int8 after them.
        precision: one of `PRECISIONS`.
        target: one of the targets that `supported` knows.
        samples: arrays by input name: calibration data; only int8 cannot do without.
        edges: what else the graph must answer rightly, such as extreme values: ranges cover it too, and where the
            search judges by some of the samples, it judges by all of these.
        calibration: how ranges are taken, and what agreement with fp32 must be kept.

    Raises:
        UsageError: no such precision or target, no samples, or their names are not the inputs'.
        ModelRefused: the target cannot run it, or the agreement is not reached.
    """
    refuse_unsupported(precision, target)
    if precision == "fp32":
        return PrecisionResult(model.clone(), precision, (), (), {})
    inputs = [v.name or "" for v in model.graph.inputs]
    if not samples and (precision == "int8" or not edges):
        raise UsageError(
            f"precision {precision} needs samples to judge by, none were given",
            hint="give calibration data: a folder of .npz files with an array for each input",
        )
    # A case holds the spec's inputs, of which a pass may have pruned some.
    given, extreme = (
        [checked_sample({n: a for n, a in s.items() if n in inputs}, inputs, f"{what} {i}") for i, s in enumerate(some)]
        for what, some in (("sample", samples), ("edge", edges))
    )
    if precision == "int8":
        from compiler.precision.int8 import quantize_static

        result = quantize_static(model, target, given, extreme, calibration)
    elif precision == "int8_dynamic":
        from compiler.precision.int8 import quantize_dynamically

        result = quantize_dynamically(model, given, extreme, calibration)
    else:
        from compiler.precision.half import convert_half

        result = convert_half(model, precision, given, extreme, calibration)
    notes = (*warnings(precision, target), *result.notes)
    return PrecisionResult(result.model, precision, result.held, notes, result.counts, result.agreement, result.search)
