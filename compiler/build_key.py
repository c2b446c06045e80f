"""What a build is made from, as one key: where it is that of the newest version, there is nothing to do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compiler.calibration_spec import calibration_files
from compiler.fingerprint import code_fingerprint, cpu_description, inputs_fingerprint, sha256_json
from compiler.metric import metric_files
from compiler.optimise import Choice
from compiler.repository import Published, Repository
from compiler.sources import source_files, source_packages
from compiler.spec import AUTO, ModelSpec
from compiler.targets.registry import TARGET_NAMES, target_named


def model_fingerprint(spec: ModelSpec, choices: Sequence[Choice]) -> dict[str, Any]:
    """Returns the hashes and versions of all that a model's build reads, but for the code of the factory."""
    packages = (*packages_of(spec), *source_packages(spec))
    files = {**source_files(spec), **calibration_files(spec), **metric_files(spec)}
    return {**inputs_fingerprint(spec.document, files, packages), **machine_of(spec, choices)}


def machine_of(spec: ModelSpec, choices: Sequence[Choice]) -> dict[str, Any]:
    """Returns what of this machine changes the result: an engine's device, and for `auto` the processor."""
    facts: dict[str, Any] = {}
    for choice in choices:
        facts.update(target_named(choice.target).machine())
    if AUTO in (spec.target, spec.precision) or spec.slo:
        facts["processor"] = cpu_description()  # what is fastest here need not be elsewhere
    return facts


def packages_of(spec: ModelSpec) -> list[str]:
    """Returns the distributions whose version changes what is built."""
    names = TARGET_NAMES if spec.target == AUTO else (spec.target,)
    return sorted({package for name in names for package in target_named(name).packages})


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
