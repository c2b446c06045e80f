"""compile_model(): load -> reference -> export -> candidates -> publish, one visible list."""

from __future__ import annotations

import platform
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from compiler import __version__
from compiler.candidates import Candidate, Choice, build_candidate, choices_for, choose, table, time_candidates
from compiler.cases import best_case, export_sizes, make_case, parity_cases
from compiler.dtypes import AnyArray
from compiler.errors import ModelRefused
from compiler.fingerprint import code_fingerprint, cpu_description, inputs_fingerprint, sha256_json
from compiler.graph_stats import graph_stats
from compiler.passes import num_nodes
from compiler.progress import Stage, silent_stage
from compiler.recorded import record
from compiler.reference import check_output_shapes
from compiler.repository import Published, Repository
from compiler.sources import open_source, source_files, source_packages
from compiler.spec import AUTO, ModelSpec
from compiler.targets.registry import SOURCE_FILE, TARGET_NAMES, ArtifactTensor, target_named
from compiler.triton_config import model_config, text_from_config

References = Mapping[str, Mapping[str, AnyArray]]


@dataclass(frozen=True)
class BuildResult:
    """The outcome of `compile build` for one spec.

    Attributes:
        published: the version in the repository.
        built: False where the newest version was made from the same inputs and nothing was done.
        seconds: wall time.
    """

    published: Published
    built: bool
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.published.model,
            "version": self.published.version,
            "built": self.built,
            "seconds": round(self.seconds, 3),
            "path": str(self.published.folder),
            "manifest": self.published.manifest,
        }


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
    packages = (*packages_of(spec), *source_packages(spec))
    fingerprint = {
        **inputs_fingerprint(spec.document, {**source_files(spec), **calibration_files(spec)}, packages),
        **machine_of(spec, choices),
    }
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
            manifest = {
                **manifest_head(
                    spec.document, fingerprint, code, spec.path, flags=" --trust-pickle" if source.trusted else ""
                ),
                "source": {
                    "description": source.description,
                    "notes": [*source.notes, *exported.notes],
                    "trusted": list(source.trusted),
                },
                "target": chosen.choice.target,
                "backend": target.backend,
                "precision": chosen.choice.precision,
                "artifact": chosen.facts,
                "exporter": exported.exporter,
                "opset": exported.opset,
                "parameters": source.num_parameters,
                "inputs": [_tensor_json(t) for t in inputs],
                "outputs": [_tensor_json(t) for t in outputs],
                "graph": {
                    "sizes": {name: dim.opt for name, dim in spec.dims.items()},
                    "exported": graph_stats(exported.model, best_case(spec)).to_json(),
                    "shipped": chosen.stats.to_json() if chosen.stats else None,
                },
                "passes": [report.to_json() for report in chosen.passes],
                "parity": {
                    "judged_on": chosen.judged_on,
                    "artifact_was_run": chosen.judged_on == target.model_file,
                    **chosen.parity.to_json(),
                },
                "references": recorded,
                "candidates": [candidate.to_json() for candidate in candidates],
            }
            published = repository.publish(spec.name, config_text, chosen.folder, manifest)
            log.note(str(published.folder))
    return BuildResult(published, built=True, seconds=time.monotonic() - started)


def calibration_files(spec: ModelSpec) -> dict[str, Path]:
    """Returns the calibration data by name, for the build's key.

    Raises:
        SpecError: there is no such folder, or nothing in it.
    """
    if spec.calibration is None:
        return {}
    path = spec.path.parent / spec.calibration
    files = sorted(path.glob("*.npz")) if path.is_dir() else [path] if path.is_file() else []
    if not files:
        spec.at("calibration").fail(f"calibration: no .npz files in {spec.calibration}", hint=f"looked in {path}")
    return {f"{spec.calibration}/{file.name}": file for file in files}


def machine_of(spec: ModelSpec, choices: Sequence[Choice]) -> dict[str, Any]:
    """Returns what of this machine changes the result: an engine's device, and for `auto` the processor."""
    facts: dict[str, Any] = {}
    for choice in choices:
        facts.update(target_named(choice.target).machine())
    if AUTO in (spec.target, spec.precision):
        facts["processor"] = cpu_description()  # what is fastest here need not be elsewhere
    return facts


def require_targets(spec: ModelSpec, choices: Sequence[Choice]) -> None:
    """Raises EnvironmentLacks before the slow stages where the one target of the spec cannot be built here."""
    if spec.target != AUTO:
        for choice in choices:
            target_named(choice.target).require()


def packages_of(spec: ModelSpec) -> list[str]:
    """Returns the distributions whose version changes what is built."""
    names = TARGET_NAMES if spec.target == AUTO else (spec.target,)
    return sorted({package for name in names for package in target_named(name).packages})


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


def up_to_date(repository: Repository, name: str, fingerprint: dict[str, Any], folder: Path) -> Published | None:
    """Returns the newest version if it was made from the same inputs and none of its files was touched."""
    current = repository.latest(name)
    if current is None or current.version != max(repository.versions(name)):
        return None
    code = current.manifest.get("code")
    if not isinstance(code, dict):
        return None
    key = build_key(fingerprint, code_fingerprint(code, folder))
    if key != current.manifest.get("build_key") or repository.damage(current):
        return None
    return current


def build_key(fingerprint: dict[str, Any], code: dict[str, str]) -> str:
    """Returns the hash that names a build's inputs."""
    return sha256_json({"inputs": fingerprint, "code": code})


def manifest_head(
    document: dict[str, Any], fingerprint: dict[str, Any], code: dict[str, str], path: Path, flags: str = ""
) -> dict[str, Any]:
    """Returns what every manifest begins with: the inputs, and how to make the version again."""
    return {
        "build_key": build_key(fingerprint, code),
        "created_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": f"compile build {path.name}{flags}",
        "modelkiln": __version__,
        "platform": f"{platform.system()} {platform.machine()}",
        "made_from": fingerprint,
        "code": code,
        "spec": document,
    }


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


def _tensor_json(tensor: ArtifactTensor) -> dict[str, Any]:
    return {"name": tensor.name, "onnx_type": tensor.onnx_type, "shape": list(tensor.shape)}
