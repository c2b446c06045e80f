"""compile_model(): load -> reference -> export -> candidates -> publish, one visible list."""

from __future__ import annotations

import ctypes
import gc
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from compiler.build_key import model_fingerprint, up_to_date
from compiler.cache import Cache
from compiler.candidate_report import candidate_lines, table
from compiler.candidates import Candidate, build_candidate, choices_for, choose, time_candidates
from compiler.cases import Case, best_case, parity_cases
from compiler.errors import ModelRefused
from compiler.export import quiet
from compiler.fingerprint import code_fingerprint
from compiler.kept_graphs import KeptGraphs
from compiler.lock import Lock
from compiler.manifest import BuildResult, manifest_head, model_manifest
from compiler.metric import metric_for
from compiler.optimise import Choice
from compiler.progress import Stage, StageTime, silent_stage, timed
from compiler.recorded import record
from compiler.repository import Repository
from compiler.served import choose_served, require_server, serve_candidates
from compiler.source_graph import SourceGraph, source_graph
from compiler.spec import AUTO, ModelSpec
from compiler.targets.registry import ArtifactTensor, target_named
from compiler.triton_config import model_config, text_from_config
from compiler.turns import COMPARE, SERVE

Interface = tuple[Sequence[ArtifactTensor], Sequence[ArtifactTensor]]


def num_stages(spec: ModelSpec, *, locked: bool = False) -> int:
    """Returns how many stages a full build reports; the progress display counts to it."""
    if locked:
        return 5
    return 5 + (AUTO in (spec.target, spec.precision)) + (spec.slo is not None)


def compile_model(
    spec: ModelSpec,
    repository: Repository,
    *,
    force: bool = False,
    trust_pickle: bool = False,
    cache: Cache | None = None,
    lock: Lock | None = None,
    stage: Stage = silent_stage,
) -> BuildResult:
    """Builds, proves and publishes one model; does nothing where its newest version is already that.

    Args:
        spec: the validated spec.
        repository: where to publish.
        force: build even where nothing changed.
        trust_pickle: let the source's files run code where they cannot be opened otherwise.
        cache: where results of stages are kept between builds; None for nowhere.
        lock: the version to build again: its target and precision, and nothing else, are built; no search, no timing.
        stage: shows the progress.

    Raises:
        ModelkilnError: the repository is as it was.
    """
    started = time.monotonic()
    times: list[StageTime] = []
    stage = timed(stage, times)
    repository.check_publishable(spec.name)
    choices = [Choice(*lock.choice)] if lock and lock.choice else choices_for(spec)
    fingerprint = model_fingerprint(spec, choices)
    if lock:
        lock.require_inputs(fingerprint, code_fingerprint(lock.document["code"], spec.path.parent), spec.document)
    current = None if force else up_to_date(repository, spec.name, fingerprint, spec.path.parent)
    if current and (lock is None or lock.allows(current.manifest)):
        return BuildResult(current, built=False, seconds=time.monotonic() - started)
    require_targets(spec, choices, served=lock is None)
    cases = parity_cases(spec)
    source = source_graph(spec, cases, trust_pickle=trust_pickle, cache=cache, stage=stage)
    _give_back_memory()
    with tempfile.TemporaryDirectory(prefix="modelkiln-") as work:
        code: dict[str, str] = dict(source.facts.code)
        candidates = _build_candidates(spec, choices, cases, source, cache, lock, code, Path(work), stage)
        chosen, candidates = _choose(spec, candidates, Path(work), stage, measured=lock is None)
        with stage("publish") as log:
            config_text, interface = _config(spec, chosen)
            flags = " --trust-pickle" if source.facts.trusted else ""
            manifest = {
                **manifest_head(spec.document, fingerprint, code, spec.path, flags=flags),
                # Before the references are written beside the model: they are no part of its size.
                **model_manifest(spec, source.facts, candidates, chosen, interface),
                "references": record(cases, source.references, chosen.folder),
                "stages": [taken.to_json() for taken in times],
            }
            published = repository.publish(spec.name, config_text, chosen.folder, manifest)
            log.note(str(published.folder))
    return BuildResult(published, built=True, seconds=time.monotonic() - started, stages=tuple(times))


def _give_back_memory() -> None:
    """Frees what the export left: cycles that hold the torch model, and pages that the allocator keeps for later.

    Both would stand beside the runtimes' own copies of the weights at the peak: 5% of it on the demo's encoder.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc has it
    if trim is not None:
        trim(0)


def _build_candidates(
    spec: ModelSpec,
    choices: Sequence[Choice],
    cases: Sequence[Case],
    source: SourceGraph,
    cache: Cache | None,
    lock: Lock | None,
    code: dict[str, str],
    work: Path,
    stage: Stage,
) -> list[Candidate]:
    """Builds and proves each choice; `code` gets what identifies the user's code that ran for them."""
    metric = metric_for(spec, source.facts.eager_metric)
    candidates = []
    with stage("optimise, write and prove") as log:
        kept = KeptGraphs(source, cache, code, log.note, lock.search if lock else None)
        for number, choice in enumerate(choices):
            folder = work / str(number) / "version"
            with quiet():
                candidate = build_candidate(
                    source.model, spec, choice, cases, source.references, folder, metric, kept.optimise, log.step
                )
            candidates.append(candidate)
            for line in candidate_lines(candidate, len(choices) > 1):
                log.note(line)
    return candidates


def _choose(
    spec: ModelSpec, candidates: list[Candidate], work: Path, stage: Stage, *, measured: bool
) -> tuple[Candidate, list[Candidate]]:
    """Returns the candidate to ship, and all of them with what was measured."""
    if len(candidates) > 1:
        with stage(COMPARE) as log:
            candidates = time_candidates(candidates, spec, best_case(spec))
            chosen = choose(candidates)
            if not spec.slo:
                for line in table(candidates, chosen):
                    log.note(line)
    chosen = choose(candidates)
    if measured and (slo := spec.slo):
        with stage(SERVE) as log:
            candidates = serve_candidates(candidates, spec, slo, lambda c: _config(spec, c)[0], work, log.step)
            chosen = choose_served(candidates, slo, lambda: table(candidates, None, slo))
            log.note(f"{slo}, one row per request at the opt sizes:")
            for line in table(candidates, chosen, slo):
                log.note(line)
    return chosen, candidates


def _config(spec: ModelSpec, candidate: Candidate) -> tuple[str, Interface]:
    """Returns config.pbtxt of a candidate, and the inputs and outputs that its file declares."""
    target = target_named(candidate.choice.target)
    inputs, outputs = target.interface(candidate.folder)
    check_artifact(spec, inputs, outputs)
    return text_from_config(model_config(spec, target, inputs, outputs, candidate.facts)), (inputs, outputs)


def require_targets(spec: ModelSpec, choices: Sequence[Choice], *, served: bool) -> None:
    """Raises EnvironmentLacks before the slow stages where what the spec names cannot be built or served here."""
    if spec.slo and served:
        require_server()
    if spec.target != AUTO:
        for choice in choices:
            target_named(choice.target).require()


def check_artifact(spec: ModelSpec, inputs: Sequence[ArtifactTensor], outputs: Sequence[ArtifactTensor]) -> None:
    """Compares the shipped file's dtypes with those of the spec.

    Raises:
        ModelRefused: the spec gives a dtype that the file does not have.
    """
    from compiler.dtypes import dtype_from_onnx

    shipped = {t.name: dtype_from_onnx(t.onnx_type) for t in (*inputs, *outputs)}
    for tensor in spec.tensors:
        got = shipped.get(tensor.name)
        if tensor.dtype is not None and got is not None and got is not tensor.dtype:
            raise ModelRefused(
                f"'{tensor.name}' is {got.name} in the compiled file, the spec says {tensor.dtype.name}",
                hint=f"set dtype: {got.name} in the spec, or convert it in the model",
            )
