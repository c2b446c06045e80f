"""compile_model(): load -> reference -> export -> candidates -> publish, one visible list."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from compiler.build_key import model_fingerprint, up_to_date
from compiler.cache import Cache
from compiler.candidates import Candidate, Choice, build_candidate, choices_for, choose, table, time_candidates
from compiler.cases import best_case, parity_cases
from compiler.errors import ModelRefused
from compiler.manifest import BuildResult, manifest_head, model_manifest
from compiler.precision.calibration_data import calibration_code
from compiler.progress import Stage, StageTime, silent_stage, timed
from compiler.recorded import record
from compiler.repository import Repository
from compiler.source_graph import source_graph
from compiler.spec import AUTO, ModelSpec
from compiler.targets.registry import SOURCE_FILE, ArtifactTensor, target_named
from compiler.triton_config import model_config, text_from_config
from compiler.turns import COMPARE


def num_stages(spec: ModelSpec) -> int:
    """Returns how many stages a full build reports; the progress display counts to it."""
    return 6 if AUTO in (spec.target, spec.precision) else 5


def compile_model(
    spec: ModelSpec,
    repository: Repository,
    *,
    force: bool = False,
    trust_pickle: bool = False,
    cache: Cache | None = None,
    stage: Stage = silent_stage,
) -> BuildResult:
    """Builds, proves and publishes one model; does nothing where its newest version is already that.

    Args:
        spec: the validated spec.
        repository: where to publish.
        force: build even where nothing changed.
        trust_pickle: let the source's files run code where they cannot be opened otherwise.
        cache: where results of stages are kept between builds; None for nowhere.
        stage: shows the progress.

    Raises:
        ModelkilnError: the repository is as it was.
    """
    started = time.monotonic()
    times: list[StageTime] = []
    stage = timed(stage, times)
    repository.check_publishable(spec.name)
    choices = choices_for(spec)
    fingerprint = model_fingerprint(spec, choices)
    if not force and (current := up_to_date(repository, spec.name, fingerprint, spec.path.parent)):
        return BuildResult(current, built=False, seconds=time.monotonic() - started)
    require_targets(spec, choices)

    cases = parity_cases(spec)
    source = source_graph(spec, cases, trust_pickle=trust_pickle, cache=cache, stage=stage)
    with tempfile.TemporaryDirectory(prefix="modelkiln-") as work:
        candidates = []
        with stage("optimise, write and prove") as log:
            for number, choice in enumerate(choices):
                folder = Path(work, str(number), "version")
                candidates.append(
                    build_candidate(source.model, spec, choice, cases, source.references, folder, on_case=log.step)
                )
                for line in _candidate_lines(candidates[-1], len(choices) > 1):
                    log.note(line)
        if len(choices) > 1:
            with stage(COMPARE) as log:
                candidates = time_candidates(candidates, spec, best_case(spec))
                chosen = choose(candidates)
                for line in table(candidates, chosen):
                    log.note(line)
        chosen = choose(candidates)
        assert chosen.parity is not None
        with stage("publish") as log:
            target = target_named(chosen.choice.target)
            inputs, outputs = target.interface(chosen.folder)
            check_artifact(spec, inputs, outputs)
            recorded = record(cases, source.references, chosen.folder)
            config_text = text_from_config(model_config(spec, target, inputs, outputs, chosen.facts))
            # After the candidates: only those in int8 import the function.
            code = {**source.facts.code, **calibration_code(spec)}
            flags = " --trust-pickle" if source.facts.trusted else ""
            manifest = {
                **manifest_head(spec.document, fingerprint, code, spec.path, flags=flags),
                **model_manifest(spec, source.facts, candidates, chosen, (inputs, outputs)),
                "references": recorded,
            }
            published = repository.publish(spec.name, config_text, chosen.folder, manifest)
            log.note(str(published.folder))
    return BuildResult(published, built=True, seconds=time.monotonic() - started, stages=tuple(times))


def require_targets(spec: ModelSpec, choices: Sequence[Choice]) -> None:
    """Raises EnvironmentLacks before the slow stages where the one target of the spec cannot be built here."""
    if spec.target != AUTO:
        for choice in choices:
            target_named(choice.target).require()


def _candidate_lines(candidate: Candidate, named: bool) -> list[str]:
    """Returns what a person is told of one candidate while others are still being built."""
    lines = [str(candidate.choice)] if named else []
    for report in candidate.passes:
        lines += [report.line(), *(f"  note: {note}" for note in report.notes)]
    lines += candidate.facts.get("notes", ())
    if candidate.parity is not None and candidate.judged_on == SOURCE_FILE:
        file = target_named(candidate.choice.target).model_file
        lines.append(
            f"{file} itself was NOT run: this machine cannot. Parity is judged on {SOURCE_FILE}, "
            "from which it was built, with ONNX Runtime on the CPU"
        )
    if candidate.parity is not None:
        cases = len({c.case for c in candidate.parity.comparisons})
        figures = f"max abs {candidate.parity.max_abs:.2e}, worst cosine {candidate.parity.worst_cosine:.7f}"
        lines.append(f"{cases} cases: {figures}")
    if candidate.refused and named:
        lines.append(f"refused: {candidate.refused.splitlines()[0]}")
    return lines


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
