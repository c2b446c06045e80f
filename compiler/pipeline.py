"""compile_model(): reference -> export -> passes -> target -> parity -> config -> publish, one visible list."""

from __future__ import annotations

import platform
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compiler import __version__
from compiler.cases import Case, export_sizes, make_case, parity_cases
from compiler.dtypes import AnyArray
from compiler.errors import ModelRefused
from compiler.fingerprint import code_fingerprint, inputs_fingerprint, sha256_json
from compiler.passes import num_nodes, passes_for
from compiler.progress import Stage, silent_stage
from compiler.reference import check_output_shapes
from compiler.repository import Published, Repository
from compiler.sources import open_source, source_files, source_packages
from compiler.spec import ModelSpec
from compiler.targets.registry import ArtifactTensor, Target, target_named
from compiler.triton_config import model_config, text_from_config
from compiler.verify import ParityReport, refuse_failures, verify

if TYPE_CHECKING:
    import onnx_ir as ir

# The stages that a full build reports; the progress display counts to it.
NUM_STAGES = 6

References = Mapping[str, Mapping[str, AnyArray]]


@dataclass(frozen=True)
class PassReport:
    """What one pass did to the graph.

    Attributes:
        dropped: why the pass's result was thrown away, or an empty string.
    """

    name: str
    counts: dict[str, int]
    nodes_before: int
    nodes_after: int
    notes: tuple[str, ...]
    dropped: str

    def line(self) -> str:
        """Returns one line for a person."""
        if self.dropped:
            return f"{self.name}: dropped, {self.dropped}"
        found = ", ".join(f"{k} {v}" for k, v in self.counts.items() if v) or "nothing to do"
        return f"{self.name}: {found} ({self.nodes_before} -> {self.nodes_after} nodes)"


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
    target = target_named(spec.target)
    fingerprint = inputs_fingerprint(spec.document, source_files(spec), (*target.packages, *source_packages(spec)))
    if not force and (current := up_to_date(repository, spec.name, fingerprint, spec.path.parent)):
        return BuildResult(current, built=False, seconds=time.monotonic() - started)

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
        with stage("passes") as log:
            judge = _cheapest(cases)
            model, reports = run_passes(exported.model, spec, target, judge, references, Path(work, "pass"))
            for report in reports:
                log.note(report.line())
                for line in report.notes:
                    log.note(f"  note: {line}")
        files = Path(work, "version")
        files.mkdir()
        with stage("write and prove") as log:
            target.write(model, files)
            parity = verify(
                target.open(files, spec.serving.threads), cases, references, spec.tolerance, on_case=log.step
            )
            refuse_failures(parity)
            log.note(f"{len(cases)} cases: max abs {parity.max_abs:.2e}, worst cosine {parity.worst_cosine:.7f}")
        with stage("publish") as log:
            inputs, outputs = target.interface(files)
            check_artifact(spec, inputs, outputs)
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
                "target": target.name,
                "backend": target.backend,
                "precision": spec.precision,
                "exporter": exported.exporter,
                "opset": exported.opset,
                "parameters": source.num_parameters,
                "inputs": [_tensor_json(t) for t in inputs],
                "outputs": [_tensor_json(t) for t in outputs],
                "passes": [_pass_json(r) for r in reports],
                "parity": parity.to_json(),
            }
            published = repository.publish(spec.name, config_text, files, manifest)
            log.note(str(published.folder))
    return BuildResult(published, built=True, seconds=time.monotonic() - started)


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


def run_passes(
    model: ir.Model, spec: ModelSpec, target: Target, judge: Case, references: References, work: Path
) -> tuple[ir.Model, list[PassReport]]:
    """Runs the target's passes; each one's result is run and compared, and dropped where it is not equal."""
    reports = []
    for step in passes_for(spec.target):
        before = num_nodes(model)
        result = step.run(model.clone())
        dropped = ""
        if result.modified and step.verify:
            dropped = _fault(result.model, spec, target, judge, references, work)
        reports.append(PassReport(step.name, result.counts, before, num_nodes(result.model), result.notes, dropped))
        if not dropped:
            model = result.model
    return model, reports


def _fault(model: ir.Model, spec: ModelSpec, target: Target, judge: Case, references: References, work: Path) -> str:
    """Runs a rewritten graph on one case; returns what is wrong with it, or an empty string."""
    work.mkdir(exist_ok=True)
    target.write(model, work)
    try:
        report: ParityReport = verify(target.open(work, spec.serving.threads), [judge], references, spec.tolerance)
    except ModelRefused as error:
        return error.message
    return "; ".join(f"output '{c.output}': {c.problem}" for c in report.failures)


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


def _cheapest(cases: Sequence[Case]) -> Case:
    """Returns the case to judge each pass by: small, but with padding where there is any, and no 1-sized dims."""
    fit = [c for c in cases if c.name.startswith(("odd_padded", "odd", "inner_padded", "inner"))] or list(cases)
    return min(fit, key=lambda c: ("padded" not in c.name, sum(a.size for a in c.inputs.values())))


def _tensor_json(tensor: ArtifactTensor) -> dict[str, Any]:
    return {"name": tensor.name, "onnx_type": tensor.onnx_type, "shape": list(tensor.shape)}


def _pass_json(report: PassReport) -> dict[str, Any]:
    return {
        "name": report.name,
        "counts": report.counts,
        "nodes_before": report.nodes_before,
        "nodes_after": report.nodes_after,
        "notes": list(report.notes),
        "dropped": report.dropped,
    }
