"""The forms that one exported graph can be shipped in: each is built, proved and timed, and the fastest one wins."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compiler.cases import Case, best_case, precision_cases
from compiler.dtypes import AnyArray
from compiler.engine_host import host_gpus
from compiler.errors import EnvironmentLacks, ModelRefused, did_you_mean, one_of
from compiler.graph_stats import GraphStats, graph_stats
from compiler.metric import Metric
from compiler.passes import Pass, num_nodes, passes_for
from compiler.precision import (
    CalibrationOptions,
    calibration_samples,
    convert,
    held_lines,
    refuse_unsupported,
    runnable,
)
from compiler.precision.costs import compare
from compiler.served import Served
from compiler.spec import AUTO, ModelSpec
from compiler.targets.onnxruntime import open_session, write_onnx
from compiler.targets.registry import SOURCE_FILE, TARGET_NAMES, Runner, target_named
from compiler.verify import ParityReport, failure_text, verify

if TYPE_CHECKING:
    import onnx_ir as ir

References = Mapping[str, Mapping[str, AnyArray]]

# Of the loss that the tolerance allows: what an int8 graph may spend on calibration data, attempt by attempt.
LOSS_SHARES = (1.0, 0.5, 0.25)
ROUNDS, CALLS, WARMUP, REST_S = 7, 3, 2, 0.05
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
    """

    name: str
    counts: dict[str, int]
    nodes_before: int
    nodes_after: int
    notes: tuple[str, ...]
    dropped: str
    held: tuple[str, ...] = ()

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
        }


@dataclass(frozen=True)
class Candidate:
    """One choice, built.

    Attributes:
        folder: its files.
        facts: what the target says of them.
        judged_on: the file that parity ran: the shipped one, or source.onnx where this machine cannot run it.
        stats: the cost of the graph that the target was given, at the spec's opt sizes.
        latency_ms: median time of one call at the spec's opt sizes; None where it was not timed.
        metric: the value of the user's own metric, where the spec names one.
        served: what it did on a real server, where the spec has an SLO.
        refused: why it cannot be shipped, or an empty string.
    """

    choice: Choice
    folder: Path
    passes: tuple[PassReport, ...]
    facts: dict[str, Any]
    parity: ParityReport | None
    refused: str
    judged_on: str
    stats: GraphStats | None = None
    latency_ms: float | None = None
    metric: float | None = None
    served: Served | None = None

    @property
    def num_bytes(self) -> int:
        return sum(p.stat().st_size for p in self.folder.iterdir())

    def to_json(self) -> dict[str, Any]:
        return {
            "target": self.choice.target,
            "precision": self.choice.precision,
            "latency_ms": self.latency_ms,
            "worst_cosine": self.parity.worst_cosine if self.parity else None,
            "max_abs": self.parity.max_abs if self.parity else None,
            "metric": self.metric,
            "served": self.served.to_json() if self.served else None,
            "bytes": self.num_bytes,
            "refused": self.refused,
        }


def choices_for(spec: ModelSpec) -> list[Choice]:
    """Returns what the spec asks for; `auto` stands for all that can be tried here.

    Raises:
        ModelRefused: the target cannot run the precision.
        SpecError: int8 without calibration data.
    """
    if spec.precision == "int8" and spec.calibration is None:
        spec.root.fail(
            "precision int8 needs the key 'calibration'",
            hint="a folder of .npz files with real inputs, one array for each input, or "
            "a function that gives such mappings: calibration: data/calibration, or calibration: my_data:samples",
        )
    if spec.target != AUTO and spec.precision != AUTO:
        refuse_unsupported(spec.precision, spec.target)
    found = []
    for name in _runnable_targets() if spec.target == AUTO else [spec.target]:
        allowed = _auto_precisions(name, spec) if spec.precision == AUTO else (spec.precision,)
        found += [Choice(name, p) for p in allowed if p in runnable(name)]
    if not found:
        raise ModelRefused(f"no target on this machine can be built in precision {spec.precision}")
    return found


def _auto_precisions(target: str, spec: ModelSpec) -> tuple[str, ...]:
    """Returns the precisions worth trying: half precision that is written into a graph is only cast back and forth
    on a CPU, what the engine computes in by itself is not."""
    found = target_named(target)
    precisions = runnable(target)
    if found.instance_kind == "KIND_CPU":
        precisions = tuple(p for p in precisions if p not in HALF or p in found.computed)
    return precisions if spec.calibration else tuple(p for p in precisions if p != "int8")


def _runnable_targets() -> list[str]:
    """Returns the targets whose files this machine could run; what cannot be timed is no candidate."""
    has_gpu = bool(host_gpus())
    return [name for name in TARGET_NAMES if has_gpu or target_named(name).instance_kind == "KIND_CPU"]


def build_candidate(
    exported: ir.Model,
    spec: ModelSpec,
    choice: Choice,
    cases: Sequence[Case],
    references: References,
    folder: Path,
    metric: Metric | None = None,
    on_case: Callable[[int, int], None] = lambda done, total: None,
) -> Candidate:
    """Rewrites, writes and proves one choice; what goes wrong with it is told in `refused`, not raised.

    An int8 graph is made to keep the tolerance on calibration data, as ONNX Runtime computes it. Where the file then
    fails parity on other inputs or another engine, it is made again with less of the loss to spend.

    Raises:
        EnvironmentLacks: the spec names one target, and a package of it is not installed.
    """
    build = partial(_build_once, exported, spec, choice, cases, references, folder, metric, on_case)
    candidate = build(LOSS_SHARES[0])
    for share in LOSS_SHARES[1:] if choice.precision.startswith("int8") else ():
        if candidate.parity is None or not candidate.parity.failures:
            break
        shutil.rmtree(folder.parent)
        tighter = build(share)
        if tighter.parity is None:
            break  # no graph keeps so little: the first refusal says more
        candidate = tighter
    return candidate


def _build_once(
    exported: ir.Model,
    spec: ModelSpec,
    choice: Choice,
    cases: Sequence[Case],
    references: References,
    folder: Path,
    metric: Metric | None,
    on_case: Callable[[int, int], None],
    loss_share: float,
) -> Candidate:
    target = target_named(choice.target)
    folder.mkdir(parents=True, exist_ok=True)
    parity: ParityReport | None = None
    reports: list[PassReport] = []
    facts: dict[str, Any] = {}
    stats: GraphStats | None = None
    score: float | None = None
    refused, judged_on = "", target.model_file
    try:
        model, reports = optimise(exported, spec, choice, cases, references, folder.parent / "judged", loss_share)
        refuse_missing_fusions(reports, spec.require_fusion)
        stats = graph_stats(model, best_case(spec))
        facts = target.write(model, folder, replace(spec, target=choice.target, precision=choice.precision))
        run = target.open(folder, spec.serving.threads, facts)
        if run is None:
            run, judged_on = open_session(folder, spec.serving.threads, SOURCE_FILE), SOURCE_FILE
        parity = verify(run, cases, references, spec.tolerance_for(choice.precision), on_case)
        refused = failure_text(parity, target.limits)
        written_half = choice.precision in HALF and choice.precision not in target.computed
        if not refused and written_half and target.instance_kind == "KIND_CPU":
            note = _half_against_fp32(exported, spec, choice, cases, references, folder.parent, run)
            facts = {**facts, "notes": [*facts.get("notes", ()), note]}
        if metric and not refused:
            score, refused = metric.judge(run)
    except ModelRefused as error:
        refused = str(error)
    except EnvironmentLacks as error:
        if spec.target != AUTO:
            raise
        refused = error.message  # a target whose package is not here is no candidate
    return Candidate(choice, folder, tuple(reports), facts, parity, refused, judged_on, stats, metric=score)


def _half_against_fp32(
    exported: ir.Model,
    spec: ModelSpec,
    choice: Choice,
    cases: Sequence[Case],
    references: References,
    work: Path,
    run: Runner,
) -> str:
    """Times a half-precision file against fp32 of the same model: a CPU has few kernels for it, and casts instead."""
    target, folder, inputs = target_named(choice.target), work / "fp32", best_case(spec).inputs
    folder.mkdir()
    single = Choice(choice.target, "fp32")
    model, _ = optimise(exported, spec, single, cases, references, work / "judged")
    facts = target.write(model, folder, replace(spec, target=choice.target, precision="fp32"))
    fp32 = target.open(folder, spec.serving.threads, facts)
    assert fp32 is not None, "what runs in half precision runs in fp32"
    timed = compare(lambda: run(inputs), lambda: fp32(inputs))
    verdict = "slower than" if timed.low > 1 else "faster than" if timed.high < 1 else "as fast as"
    return (
        f"{choice.precision} is {verdict} fp32 on this CPU: {timed.ratio:.2f} times its latency at the opt sizes "
        f"({timed.first_ms:.3g} against {timed.second_ms:.3g} ms, half of the rounds within {timed.low:.2f} to "
        f"{timed.high:.2f}). Half precision pays on a GPU; on a CPU take fp32 or int8"
    )


def time_candidates(candidates: Sequence[Candidate], spec: ModelSpec, case: Case) -> list[Candidate]:
    """Times the proved candidates on one case, block by block in turn; the others come back as they are.

    In blocks with a rest before each and uncounted calls first: a runtime's threads spin on for a while after a call,
    and would take the cores of the next.
    """
    runs: dict[Choice, Runner] = {}
    for c in candidates:
        run = None if c.refused else target_named(c.choice.target).open(c.folder, spec.serving.threads, c.facts)
        if run is not None:
            runs[c.choice] = run
    times: dict[Choice, list[float]] = {choice: [] for choice in runs}
    for _ in range(ROUNDS if len(runs) > 1 else 0):
        for choice, run in runs.items():
            time.sleep(REST_S)
            times[choice].append(_block_ms(run, case))
    return [
        replace(c, latency_ms=round(statistics.median(times[c.choice]), 3)) if times.get(c.choice) else c
        for c in candidates
    ]


def choose(candidates: Sequence[Candidate]) -> Candidate:
    """Returns the fastest candidate that was proved.

    Raises:
        ModelRefused: none was; the message says why for each.
    """
    proved = [c for c in candidates if not c.refused]
    if not proved:
        if len(candidates) == 1:
            message, _, hint = candidates[0].refused.partition("\n  hint: ")
            raise ModelRefused(message, hint=hint)
        reasons = "\n".join(f"  {c.choice}: {c.refused}" for c in candidates)
        raise ModelRefused(f"none of {len(candidates)} candidates can be shipped:\n{reasons}")
    return min(proved, key=lambda c: c.latency_ms if c.latency_ms is not None else 0.0)


def optimise(
    model: ir.Model,
    spec: ModelSpec,
    choice: Choice,
    cases: Sequence[Case],
    references: References,
    work: Path,
    loss_share: float = 1.0,
) -> tuple[ir.Model, list[PassReport]]:
    """Runs the target's passes and writes the precision into the graph, at a share of the loss that is allowed.

    Half precision comes before the fusions, whose operators have few half-precision kernels and no rules for
    casts; int8 after them, since a fused node is one to quantise or to hold. Each pass is judged by the precision
    that the graph has by then.
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
            model, report = _convert(model, spec, choice, loss_share)
            reports.append(report)
            judged_as = choice.precision
    return model, reports


def _convert(model: ir.Model, spec: ModelSpec, choice: Choice, loss_share: float) -> tuple[ir.Model, PassReport]:
    """Writes a lower precision into the graph; held nodes are told with their reasons."""
    inputs = [value.name or "" for value in model.graph.inputs]
    # Parity asks for the extremes that the spec allows, whatever the calibration data hold.
    edges = [dict(case.inputs) for case in precision_cases(spec)]
    samples = calibration_samples(spec, inputs) if choice.precision == "int8" else []
    allowed = 1 - spec.agreement_for(choice.precision)
    options = CalibrationOptions(min_cosine=1 - loss_share * allowed)
    if spec.calibration is not None:
        options = replace(options, method=spec.calibration.method, percentile=spec.calibration.percentile)
    result = convert(model, choice.precision, choice.target, samples, edges=edges, calibration=options)
    notes = (*result.notes, *held_lines(result.held))
    name = f"convert_to_{choice.precision}"
    before, after = num_nodes(model), num_nodes(result.model)
    return result.model, PassReport(
        name, result.counts, before, after, notes, "", held=tuple(node.name for node in result.held)
    )


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


def _block_ms(run: Runner, case: Case) -> float:
    times = []
    for _ in range(WARMUP + CALLS):
        started = time.perf_counter_ns()
        run(case.inputs)
        times.append((time.perf_counter_ns() - started) / 1e6)
    return statistics.median(times[WARMUP:])


def _cheapest(cases: Sequence[Case]) -> Case:
    """Returns the case to judge passes by: small, with padding where there is any, no dim of size 1."""
    fit = [c for c in cases if c.name.startswith(("odd", "inner"))] or list(cases)
    return min(fit, key=lambda c: ("padded" not in c.name, sum(a.size for a in c.inputs.values())))
