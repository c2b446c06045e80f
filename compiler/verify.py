"""Parity: does a file answer as the model does? Pure comparison, and its run over all cases."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from compiler.cases import Case
from compiler.dtypes import AnyArray
from compiler.errors import ModelRefused
from compiler.spec import Tolerance
from compiler.targets.registry import Runner

# How long a row may be where the model gives zeros, as a share of its longest row.
MAX_STRAY = 1e-2


@dataclass(frozen=True)
class Comparison:
    """One output of one case against the reference.

    Attributes:
        max_abs: largest |got - want|.
        max_rel: largest |got - want| / |want| over the elements where want is not 0.
        cosine: the smallest cosine between rows (the last axis), 1 for integers that are equal.
        outliers: share of elements outside atol + rtol * |want|, 0 to 1.
        problem: why it failed, or an empty string.
    """

    case: str
    output: str
    max_abs: float
    max_rel: float
    cosine: float
    outliers: float
    problem: str

    @property
    def passed(self) -> bool:
        return not self.problem


@dataclass(frozen=True)
class ParityReport:
    """All comparisons of one file."""

    comparisons: tuple[Comparison, ...]
    tolerance: Tolerance

    @property
    def failures(self) -> tuple[Comparison, ...]:
        return tuple(c for c in self.comparisons if not c.passed)

    @property
    def worst_cosine(self) -> float:
        return min((c.cosine for c in self.comparisons), default=1.0)

    @property
    def max_abs(self) -> float:
        return max((c.max_abs for c in self.comparisons), default=0.0)

    def to_json(self) -> dict[str, Any]:
        return {
            "tolerance": asdict(self.tolerance),
            "num_cases": len({c.case for c in self.comparisons}),
            "max_abs": self.max_abs,
            "worst_cosine": self.worst_cosine,
            "comparisons": [asdict(c) for c in self.comparisons],
        }


# The part of atol + rtol * |want| up to which a row's direction is not asked for.
NEARLY_EXACT = 0.1
_TIES = (
    "which index comes first among equal or nearly equal scores (topk, sort, argmax) is not defined: "
    "return the scores, and take the index where they are read"
)


def compare(case: str, output: str, want: AnyArray, got: AnyArray, tolerance: Tolerance) -> Comparison:
    """Compares one output; NaN or infinity in `got` fails, integers must be equal."""

    def result(
        problem: str, max_abs: float = np.inf, rel: float = np.inf, cosine: float = -1.0, out: float = 1.0
    ) -> Comparison:
        return Comparison(case, output, max_abs, rel, cosine, out, problem)

    if want.shape != got.shape:
        return result(f"shape {list(got.shape)}, the model gives {list(want.shape)}")
    if want.dtype != got.dtype:
        return result(f"dtype {got.dtype}, the model gives {want.dtype}")
    if want.size == 0:
        return result("", 0.0, 0.0, 1.0, 0.0)
    if want.dtype.kind != "f":
        different = float(np.mean(want != got))
        distance = np.abs(want.astype(np.float64) - got.astype(np.float64)).max()
        problem = f"{different:.2%} of the elements differ" if different else ""
        return result(problem, float(distance), 0.0, 1.0 - different, different)
    if not np.isfinite(got).all():
        return result(f"{int((~np.isfinite(got)).sum())} NaN or infinite values")
    wide, other = want.astype(np.float64), got.astype(np.float64)
    difference = np.abs(other - wide)
    outliers = 0.0
    if tolerance.atol is not None:
        outliers = float(np.mean(difference > tolerance.atol + tolerance.rtol * np.abs(wide)))
    nonzero = wide != 0
    rel = float((difference[nonzero] / np.abs(wide[nonzero])).max()) if nonzero.any() else 0.0
    rows = _rows_to_judge(difference, wide, tolerance)
    cosine = _worst_row_cosine(wide[rows], other[rows], tolerance.atol or 1e-6) if rows.any() else 1.0
    problem = ""
    if outliers:
        problem = f"{outliers:.2%} of the elements are off by more than atol + rtol * |want|"
    elif cosine < tolerance.cosine:
        problem = f"cosine {cosine:.6f} is below {tolerance.cosine}"
    return result(problem, float(difference.max()), rel, cosine, outliers)


def verify(
    run: Runner,
    cases: Sequence[Case],
    references: Mapping[str, Mapping[str, AnyArray]],
    tolerance: Tolerance,
    on_case: Callable[[int, int], None] = lambda done, total: None,
) -> ParityReport:
    """Runs every case through the file and compares each output with the reference.

    Args:
        run: the file, opened as it will be served.
        cases: what to run.
        references: the model's outputs by case and name.
        tolerance: what counts as equal.
        on_case: called with (done, total) after each case.

    Raises:
        ModelRefused: the file fails to run a case; the message names the sizes.
    """
    comparisons = []
    for done, case in enumerate(cases, start=1):
        try:
            outputs = run(case.inputs)
        except ModelRefused as error:
            raise ModelRefused(f"parity case {case.name}: {error.message}", hint=error.hint) from error
        for name, want in references[case.name].items():
            comparisons.append(compare(case.name, name, want, outputs[name], tolerance))
        on_case(done, len(cases))
    return ParityReport(tuple(comparisons), tolerance)


def failure_text(report: ParityReport, known_limits: str = "") -> str:
    """Returns the worst failure and the limits in words, or an empty string; `known_limits` may explain it."""
    if not report.failures:
        return ""
    worst = max(report.failures, key=lambda c: (c.outliers, c.max_abs))
    limits = report.tolerance
    atol = "not judged" if limits.atol is None else f"{limits.atol:g}"
    if worst.problem.endswith("of the elements differ"):
        known_limits = "; ".join(filter(None, (known_limits, _TIES)))
    return (
        f"the compiled file does not answer as the model does: {len(report.failures)} of "
        f"{len(report.comparisons)} comparisons failed. Worst: {worst.case}, output '{worst.output}': "
        f"{worst.problem} (max abs {worst.max_abs:.3g}, cosine {worst.cosine:.6f})"
        f"\n  hint: allowed: atol {atol}, rtol {limits.rtol:g}, cosine {limits.cosine:g} (tolerance in the spec)"
        + (f"; note that {known_limits}" if known_limits else "")
    )


def _rows_to_judge(difference: Any, want: Any, tolerance: Tolerance) -> AnyArray:
    """Returns which rows have a direction that says something: not those that are nearly exact, element by element.

    A heat map's background of 1e-6 that is off by 1e-7 has a bad cosine, and is right.
    """
    if tolerance.atol is None or want.ndim == 0 or want.shape[-1] < 2:
        return np.ones(want.shape[:-1], np.bool_)
    allowed = NEARLY_EXACT * (tolerance.atol + tolerance.rtol * np.abs(want))
    rows: AnyArray = (difference > allowed).any(axis=-1)
    return rows


def _worst_row_cosine(want: AnyArray, got: AnyArray, tiny: float) -> float:
    """Returns the smallest cosine between rows; a row of zeros has no direction.

    0 where zeros stand for a row that has one, or where a row of zeros came out as long as others.
    """
    rows_want = want.reshape(-1, want.shape[-1]) if want.ndim else want.reshape(1, 1)
    rows_got = got.reshape(rows_want.shape)
    if rows_want.shape[1] < 2:
        # A single number has no direction: its cosine is only a sign.
        rows_want, rows_got = rows_want.reshape(1, -1), rows_got.reshape(1, -1)
    lengths, others = np.linalg.norm(rows_want, axis=1), np.linalg.norm(rows_got, axis=1)
    judged = lengths > tiny
    if not judged.any():
        return 1.0
    if (others[~judged] > max(tiny, MAX_STRAY * lengths.max())).any():
        return 0.0
    dots = np.einsum("ij,ij->i", rows_want[judged], rows_got[judged])
    return float((dots / np.maximum(lengths[judged] * others[judged], 1e-300)).min())
