"""compile_model(): load -> reference -> export -> candidates -> publish, one visible list."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from compiler.build_key import model_fingerprint, up_to_date
from compiler.candidates import Candidate, Choice, build_candidate, choices_for, choose, table, time_candidates
from compiler.cases import best_case, export_sizes, make_case, parity_cases
from compiler.dtypes import AnyArray
from compiler.errors import ModelRefused
from compiler.manifest import BuildResult, manifest_head, model_manifest
from compiler.passes import num_nodes
from compiler.progress import Stage, silent_stage
from compiler.recorded import record
from compiler.reference import check_output_shapes
from compiler.repository import Repository
from compiler.sources import open_source
from compiler.spec import AUTO, ModelSpec
from compiler.targets.registry import SOURCE_FILE, ArtifactTensor, target_named
from compiler.triton_config import model_config, text_from_config

References = Mapping[str, Mapping[str, AnyArray]]


def num_stages(spec: ModelSpec) -> int:
    """Returns how many stages a full build reports; the progress display counts to it."""
    return 6 if AUTO in (spec.target, spec.precision) else 5


def compile_model(
    spec: ModelSpec,
    repository: Repository,
    *,
    force: bool = False,
    trust_pickle: bool = False,
    stage: Stage = silent_stage,
) -> BuildResult:
    """Builds, proves and publishes one model; does nothing where its newest version is already that.

    Args:
        spec: the validated spec.
        repository: where to publish.
        force: build even where nothing changed.
        trust_pickle: let the source's files run code where they cannot be opened otherwise.
        stage: shows the progress.

    Raises:
        ModelkilnError: the repository is as it was.
    """
    started = time.monotonic()
    repository.check_publishable(spec.name)
    choices = choices_for(spec)
    fingerprint = model_fingerprint(spec, choices)
    if not force and (current := up_to_date(repository, spec.name, fingerprint, spec.path.parent)):
        return BuildResult(current, built=False, seconds=time.monotonic() - started)
    require_targets(spec, choices)

    with stage("load the model") as log:
        source = open_source(spec, trust_pickle=trust_pickle)
        for line in (source.description, *source.notes):
            log.note(line)
    with stage("run the reference") as log:
        traced = make_case(spec, "export", export_sizes(spec), padded=False)
        source.reference(traced)
        cases = parity_cases(spec)
        references = {}
        for done, case in enumerate(cases, start=1):
            references[case.name] = source.reference(case)
            log.step(done, len(cases))
    with stage("export to ONNX") as log:
        exported = source.export(traced)
        # After the export, which names the line where a size was baked in.
        for case in cases:
            check_output_shapes(spec, case, references[case.name])
        code = source.code()
        log.note(f"opset {exported.opset}, {num_nodes(exported.model)} nodes")
        for line in exported.notes:
            log.note(line)
    with tempfile.TemporaryDirectory(prefix="modelkiln-") as work:
        candidates = []
        with stage("optimise, write and prove") as log:
            for number, choice in enumerate(choices):
                folder = Path(work, str(number), "version")
                candidates.append(
                    build_candidate(exported.model, spec, choice, cases, references, folder, on_case=log.step)
                )
                for line in _candidate_lines(candidates[-1], len(choices) > 1):
                    log.note(line)
        if len(choices) > 1:
            with stage("compare the candidates") as log:
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
            recorded = record(cases, references, chosen.folder)
            config_text = text_from_config(model_config(spec, target, inputs, outputs))
            flags = " --trust-pickle" if source.trusted else ""
            manifest = {
                **manifest_head(spec.document, fingerprint, code, spec.path, flags=flags),
                **model_manifest(spec, source, exported, candidates, chosen, (inputs, outputs)),
                "references": recorded,
            }
            published = repository.publish(spec.name, config_text, chosen.folder, manifest)
            log.note(str(published.folder))
    return BuildResult(published, built=True, seconds=time.monotonic() - started)


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
