"""The reference outputs that a version carries, so that it can be proved again where its source is not at hand."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from compiler.cases import Case, parity_cases
from compiler.dtypes import AnyArray
from compiler.errors import RepositoryError, UsageError
from compiler.metric import measure
from compiler.repository import Published, Repository
from compiler.spec import ModelSpec, Tolerance, model_spec_from_file, model_spec_from_node
from compiler.targets.registry import Runner, target_named
from compiler.verify import ParityReport, verify
from compiler.yaml_reader import node_from_plain

REFERENCE_FILE = "reference.npz"
# Outputs of dense models are large; what does not fit is left out, largest first, and not counted as proved again.
MAX_REFERENCE_BYTES = 32 << 20


def record(cases: Sequence[Case], references: Mapping[str, Mapping[str, AnyArray]], folder: Path) -> dict[str, str]:
    """Writes the reference outputs beside the model; returns the sha256 of each recorded case's inputs.

    Inputs are not written: they follow from the spec, and their hash shows that they still do.
    """
    arrays: dict[str, AnyArray] = {}
    kept: dict[str, str] = {}
    used = 0
    for case in sorted(cases, key=lambda c: sum(a.nbytes for a in references[c.name].values())):
        size = sum(array.nbytes for array in references[case.name].values())
        if kept and used + size > MAX_REFERENCE_BYTES:
            continue
        used += size
        kept[case.name] = inputs_sha256(case)
        for name, array in references[case.name].items():
            arrays[f"{case.name}/{name}"] = array
    np.savez_compressed(folder / REFERENCE_FILE, **arrays)  # type: ignore[arg-type]
    return kept


def inputs_sha256(case: Case) -> str:
    digest = hashlib.sha256()
    for name, array in sorted(case.inputs.items()):
        digest.update(f"{name}:{array.dtype}:{array.shape};".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def verify_again(repository: Repository, published: Published) -> ParityReport:
    """Opens the files of a published version and compares them with the outputs recorded in it.

    Raises:
        RepositoryError: files are damaged, or the version carries no references (an ensemble, a Python step).
    """
    problems = repository.damage(published)
    shown = f"{published.model} version {published.version}"
    if problems:
        raise RepositoryError(f"{shown}: {'; '.join(problems)}", hint="build it again: compile build SPEC --force")
    recorded = published.manifest.get("references")
    if not isinstance(recorded, dict) or not recorded:
        raise RepositoryError(f"{shown} carries no reference outputs: only compiled models do")
    spec = _recorded_spec(published)
    cases = _recorded_cases(spec, recorded, shown)
    references = load_outputs(published.folder / REFERENCE_FILE, cases)
    return verify(open_published(published), cases, references, tolerance_of(published.manifest))


def verify_metric(published: Published, path: Path) -> dict[str, Any]:
    """Runs the metric of the user's spec on the files of a published version.

    Returns:
        The function, its value, the limits, what the eager model reached, and the problem or an empty string.

    Raises:
        UsageError: the spec is another model's, or has no metric.
        ModelRefused: the function fails.
    """
    spec = model_spec_from_file(path)
    if spec.name != published.model or spec.metric is None:
        raise UsageError(
            f"{path} is the spec of '{spec.name}' {'with' if spec.metric else 'without'} a metric",
            hint=f"give the spec of '{published.model}', with the key 'metric'",
        )
    value = measure(spec, spec.metric, open_published(published))
    eager = (published.manifest.get("metric") or {}).get("eager")
    limits = {"min": spec.metric.min, "max": spec.metric.max}
    problem = spec.metric.problem(value)
    return {"function": spec.metric.function, "value": value, "eager": eager, **limits, "problem": problem}


def open_published(published: Published) -> Runner:
    """Opens the files of a version as they are served.

    Raises:
        RepositoryError: they are an engine for another device.
    """
    target = target_named(str(published.manifest["target"]))
    threads = _recorded_spec(published).serving.threads
    run = target.open(published.folder, threads, published.manifest["artifact"])
    if run is None:
        shown = f"{published.model} version {published.version}"
        raise RepositoryError(f"{shown} cannot be run on this machine: it was built for another device")
    return run


def _recorded_spec(published: Published) -> ModelSpec:
    shown = f"{published.model} version {published.version}/manifest.json"
    return model_spec_from_node(node_from_plain(published.manifest["spec"], shown), published.folder / "spec.yaml")


def tolerance_of(manifest: Mapping[str, Any]) -> Tolerance:
    """Returns the tolerance that the version was judged by."""
    return Tolerance(**manifest["parity"]["tolerance"])


def _recorded_cases(spec: ModelSpec, recorded: Mapping[str, str], shown: str) -> list[Case]:
    cases = [case for case in parity_cases(spec) if case.name in recorded]
    changed = [case.name for case in cases if inputs_sha256(case) != recorded[case.name]]
    missing = sorted(set(recorded) - {case.name for case in cases})
    if changed or missing:
        raise RepositoryError(
            f"{shown}: the inputs of its cases cannot be made again ({', '.join([*changed, *missing][:3])}): "
            "another numpy or another modelkiln draws other values",
            hint="build it again: compile build SPEC --force",
        )
    return cases


def load_outputs(path: Path, cases: Sequence[Case]) -> dict[str, dict[str, AnyArray]]:
    """Reads outputs by case and name from a file whose arrays are named `case/output`."""
    references: dict[str, dict[str, AnyArray]] = {case.name: {} for case in cases}
    with np.load(path, allow_pickle=False) as arrays:
        for key in arrays.files:
            case, _, output = key.partition("/")
            references[case][output] = arrays[key]
    return references
