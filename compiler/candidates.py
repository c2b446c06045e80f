"""The forms that one exported graph can be shipped in: each is built, proved and timed, and the fastest one wins."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compiler.cases import Case, best_case
from compiler.engine_host import host_gpus
from compiler.errors import EnvironmentLacks, ModelRefused
from compiler.graph_stats import GraphStats, graph_stats
from compiler.metric import Metric
from compiler.optimise import HALF, Choice, Optimise, PassReport, References, optimise, refuse_missing_fusions
from compiler.precision import (
    refuse_unsupported,
    runnable,
)
from compiler.precision.costs import compare
from compiler.served import Served
from compiler.spec import AUTO, ModelSpec
from compiler.targets.onnxruntime import open_session
from compiler.targets.registry import SOURCE_FILE, TARGET_NAMES, Runner, target_named
from compiler.verify import ParityReport, failure_text, verify

if TYPE_CHECKING:
    import onnx_ir as ir

# Of the loss that the tolerance allows: what an int8 graph may spend on calibration data, attempt by attempt.
LOSS_SHARES = (1.0, 0.5, 0.25)
ROUNDS, CALLS, WARMUP, REST_S = 7, 3, 2, 0.05


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
    rewrite: Optimise = optimise,
    on_case: Callable[[int, int], None] = lambda done, total: None,
) -> Candidate:
    """Rewrites, writes and proves one choice; what goes wrong with it is told in `refused`, not raised.

    An int8 graph is made to keep the tolerance on calibration data, as ONNX Runtime computes it. Where the file then
    fails parity on other inputs or another engine, it is made again with less of the loss to spend.

    Args:
        exported: the graph as it was exported.
        spec, choice: what is asked for.
        cases, references: what the file must answer, and how.
        folder: where its files go.
        metric: the user's own, which judges too.
        rewrite: what makes the target's graph; `KeptGraphs.optimise` asks the cache first.
        on_case: called with (done, total) while it is proved.

    Raises:
        EnvironmentLacks: the spec names one target, and a package of it is not installed.
    """
    build = partial(_build_once, exported, spec, choice, cases, references, folder, metric, rewrite, on_case)
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
    rewrite: Optimise,
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
        model, reports = rewrite(exported, spec, choice, cases, references, folder.parent / "judged", loss_share)
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
            single = replace(choice, precision="fp32")
            fp32, _ = rewrite(exported, spec, single, cases, references, folder.parent / "judged", 1.0)
            note = _half_against_fp32(fp32, spec, choice, folder.parent, run)
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


def _half_against_fp32(model: ir.Model, spec: ModelSpec, choice: Choice, work: Path, run: Runner) -> str:
    """Times a half-precision file against fp32 of the same model: a CPU has few kernels for it, and casts instead."""
    target, folder, inputs = target_named(choice.target), work / "fp32", best_case(spec).inputs
    folder.mkdir()
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


def _block_ms(run: Runner, case: Case) -> float:
    times = []
    for _ in range(WARMUP + CALLS):
        started = time.perf_counter_ns()
        run(case.inputs)
        times.append((time.perf_counter_ns() - started) / 1e6)
    return statistics.median(times[WARMUP:])
