"""From the exported graph to the one that a target gets: its passes, each compared, and the precision written in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compiler.cases import Case, precision_cases
from compiler.dtypes import AnyArray
from compiler.errors import ModelRefused, did_you_mean, one_of
from compiler.passes import Pass, num_nodes, passes_for
from compiler.precision import CalibrationOptions, calibration_samples, convert, held_lines
from compiler.precision.search import SearchResult
from compiler.spec import ModelSpec
from compiler.targets.onnxruntime import open_session, write_onnx
from compiler.targets.registry import target_named
from compiler.verify import verify

if TYPE_CHECKING:
    import onnx_ir as ir

References = Mapping[str, Mapping[str, AnyArray]]

HALF = ("fp16", "bf16")


@dataclass(frozen=True)
class Choice:
    """A target and a precision."""

    target: str
    precision: str

    def __str__(self) -> str:
        return f"{self.target} {self.precision}"


@dataclass(frozen=True)
class PassReport:
    """What one pass did to the graph.

    Attributes:
        dropped: why the pass's result was thrown away, or an empty string.
        held: names of the nodes that a lower precision left in fp32.
        search: how those that cost accuracy were found, as `SearchResult.to_json` gives it.
    """

    name: str
    counts: dict[str, int]
    nodes_before: int
    nodes_after: int
    notes: tuple[str, ...]
    dropped: str
    held: tuple[str, ...] = ()
    search: dict[str, Any] | None = None

    def line(self) -> str:
        """Returns one line for a person."""
        if self.dropped:
            return f"{self.name}: dropped, {self.dropped}"
        found = ", ".join(f"{k} {v}" for k, v in self.counts.items() if v) or "nothing to do"
        return f"{self.name}: {found} ({self.nodes_before} -> {self.nodes_after} nodes)"

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "counts": self.counts,
            "nodes_before": self.nodes_before,
            "nodes_after": self.nodes_after,
            "notes": list(self.notes),
            "dropped": self.dropped,
            "held": list(self.held),
            "search": self.search,
        }


# What gives the graph of a choice: (exported, spec, choice, cases, references, work, loss_share) -> (graph, reports).
Optimise = Callable[
    ["ir.Model", ModelSpec, Choice, Sequence[Case], References, Path, float], tuple["ir.Model", list[PassReport]]
]


def optimise(
    model: ir.Model,
    spec: ModelSpec,
    choice: Choice,
    cases: Sequence[Case],
    references: References,
    work: Path,
    loss_share: float = 1.0,
    known: SearchResult | None = None,
) -> tuple[ir.Model, list[PassReport]]:
    """Runs the target's passes and writes the precision into the graph, at a share of the loss that is allowed.

    Half precision comes before the fusions, whose operators have few half-precision kernels and no rules for
    casts; int8 after them, since a fused node is one to quantise or to hold. Each pass is judged by the precision
    that the graph has by then. With a `known` search nothing is searched.
    """
    stages: dict[str, list[Pass]] = {"clean": [], "fuse": [], "last": []}
    for step in passes_for(choice.target):
        stages[step.stage].append(step)
    half = choice.precision in HALF and choice.precision not in target_named(choice.target).computed
    int8 = choice.precision.startswith("int8")
    judge, judged_as, reports = _cheapest(cases), "fp32", []
    for stage, converts in (("clean", half), ("fuse", int8), ("last", False)):
        model, more = run_passes(stages[stage], model, spec, judged_as, judge, references, work)
        reports += more
        if converts:
            model, report = _convert(model, spec, choice, loss_share, known)
            reports.append(report)
            judged_as = choice.precision
    return model, reports


def _convert(
    model: ir.Model, spec: ModelSpec, choice: Choice, loss_share: float, known: SearchResult | None
) -> tuple[ir.Model, PassReport]:
    """Writes a lower precision into the graph; held nodes are told with their reasons."""
    inputs = [value.name or "" for value in model.graph.inputs]
    # Parity asks for the extremes that the spec allows, whatever the calibration data hold.
    edges = [dict(case.inputs) for case in precision_cases(spec)]
    samples = calibration_samples(spec, inputs) if choice.precision == "int8" else []
    allowed = 1 - spec.agreement_for(choice.precision)
    options = CalibrationOptions(min_cosine=1 - loss_share * allowed, known=known)
    if spec.calibration is not None:
        options = replace(options, method=spec.calibration.method, percentile=spec.calibration.percentile)
    result = convert(model, choice.precision, choice.target, samples, edges=edges, calibration=options)
    notes = (*result.notes, *held_lines(result.held))
    name = f"convert_to_{choice.precision}"
    before, after = num_nodes(model), num_nodes(result.model)
    held = tuple(node.name for node in result.held)
    search = result.search.to_json() if result.search else None
    return result.model, PassReport(name, result.counts, before, after, notes, "", held, search)


def run_passes(
    steps: Sequence[Pass],
    model: ir.Model,
    spec: ModelSpec,
    precision: str,
    judge: Case,
    references: References,
    work: Path,
) -> tuple[ir.Model, list[PassReport]]:
    """Runs passes in order; each one's result is run and compared, and dropped where it is not equal."""
    reports = []
    for step in steps:
        before = num_nodes(model)
        result = step.run(model.clone())
        dropped = ""
        if result.modified and step.verify:
            dropped = _fault(result.model, spec, precision, judge, references, work)
        reports.append(PassReport(step.name, result.counts, before, num_nodes(result.model), result.notes, dropped))
        if not dropped:
            model = result.model
    return model, reports


def refuse_missing_fusions(reports: Sequence[PassReport], required: Mapping[str, int]) -> None:
    """Raises ModelRefused where fewer fusions were found than the spec requires.

    An exporter that changes its graphs makes a pattern find nothing; the model would be right, and slow.
    """
    found = {name: count for report in reports if not report.dropped for name, count in report.counts.items()}
    for name, count in required.items():
        if name not in found:
            raise ModelRefused(
                f"fusion '{name}' is required, and this target has none of that name{did_you_mean(name, found)}",
                hint=f"its passes count: {one_of(found)}",
            )
        if found[name] < count:
            notes = "; ".join(note for report in reports for note in report.notes)
            raise ModelRefused(
                f"fusion '{name}' was found {found[name]} times, {count} are required"
                + (f" ({notes})" if notes else ""),
                hint="`compile explain` shows the graph; the exporter may have changed its form",
            )


def _fault(model: ir.Model, spec: ModelSpec, precision: str, judge: Case, references: References, work: Path) -> str:
    """Runs a rewritten graph on one case; returns what is wrong with it, or an empty string."""
    work.mkdir(exist_ok=True)
    try:
        write_onnx(model, work)
        run = open_session(work, spec.serving.threads)
        limits = replace(spec.tolerance_for(precision), cosine=spec.agreement_for(precision))
        report = verify(run, [judge], references, limits)
    except ModelRefused as error:
        return error.message
    return "; ".join(f"output '{c.output}': {c.problem}" for c in report.failures)


def _cheapest(cases: Sequence[Case]) -> Case:
    """Returns the case to judge passes by: small, with padding where there is any, no dim of size 1."""
    fit = [c for c in cases if c.name.startswith(("odd", "inner"))] or list(cases)
    return min(fit, key=lambda c: ("padded" not in c.name, sum(a.size for a in c.inputs.values())))
