"""What this machine has for running an engine, and whether an engine fits it. The comparison is pure."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# The distributions that carry each library, the one with the library's own name first.
DISTRIBUTIONS = {
    "tensorrt": ("tensorrt", "tensorrt-cu13", "tensorrt-cu12"),
    "tensorrt-rtx": ("tensorrt-rtx", "tensorrt-rtx-cu13", "tensorrt-rtx-cu12"),
}
_AMPERE = (8, 0)


@dataclass(frozen=True)
class Gpu:
    """An NVIDIA GPU that the driver reports; its compute capability as `8.6`, or empty where it is not told."""

    name: str
    compute_capability: str


@dataclass(frozen=True)
class EngineHost:
    """A machine that engines are to run on.

    Attributes:
        gpus: empty where there is none.
        versions: the installed version of each library, by target; one that is absent is left out.
    """

    gpus: tuple[Gpu, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "compute_capabilities": [gpu.compute_capability for gpu in self.gpus],
            "versions": dict(self.versions),
        }


def this_host() -> EngineHost:
    """Looks at this machine."""
    versions = {target: installed_version(target) for target in DISTRIBUTIONS}
    return EngineHost(host_gpus(), {t: v for t, v in versions.items() if v})


def installed_version(target: str) -> str:
    """Returns the installed version of a target's library, or an empty string."""
    for name in DISTRIBUTIONS[target]:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return ""


def host_gpus() -> tuple[Gpu, ...]:
    """Returns the NVIDIA GPUs that the driver reports."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    query = [tool, "--query-gpu=name,compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return gpus_from_csv(done.stdout) if done.returncode == 0 else ()


def gpus_from_csv(text: str) -> tuple[Gpu, ...]:
    """Reads `nvidia-smi --query-gpu=name,compute_cap --format=csv,noheader`."""
    gpus = []
    for line in filter(None, map(str.strip, text.splitlines())):
        name, _, capability = line.rpartition(",")
        number = capability.strip()
        known = number.replace(".", "", 1).isdigit()
        gpus.append(Gpu(name.strip() or number, number if name and known else ""))
    return tuple(gpus)


def engine_problems(facts: Mapping[str, Any], host: EngineHost) -> list[str]:
    """Compares an engine with a machine; returns what would fail at load, in words, both values shown.

    Args:
        facts: the `artifact` of the engine's manifest.
        host: the machine that would run it.
    """
    target = str(facts.get("library", "tensorrt"))
    listed = facts.get("compute_capabilities")
    built_for = [str(c) for c in listed] if isinstance(listed, list) else []
    if not host.gpus:
        return [
            f"is a {target} engine for compute capability {', '.join(built_for) or 'unknown'}, and this machine has no "
            "NVIDIA GPU; build it with target: onnxruntime to serve it here"
        ]
    problems = []
    for gpu in host.gpus:
        if gpu.compute_capability and not _capability_fits(built_for, gpu.compute_capability, facts):
            problems.append(
                f"the engine was built for compute capability {', '.join(built_for) or 'unknown'}, and this machine's "
                f"{gpu.name} has {gpu.compute_capability}; build it again on this machine"
            )
    built_with, here = str(facts.get("library_version", "unknown")), host.versions.get(target)
    if here and not _version_fits(built_with, here, facts):
        problems.append(
            f"the engine was built with {target} {built_with}, and this machine has {here}; "
            "build it again with that version"
        )
    return list(dict.fromkeys(problems))


def _capability_fits(built_for: Sequence[str], here: str, facts: Mapping[str, Any]) -> bool:
    if here in built_for:
        return True
    ampere_plus = _option(facts, "hardware_compatibility") == "ampere_plus"
    return ampere_plus and tuple(map(int, here.split("."))) >= _AMPERE


def _version_fits(built_with: str, here: str, facts: Mapping[str, Any]) -> bool:
    if built_with == here:
        return True
    if not _option(facts, "version_compatible"):
        return False
    # A version-compatible engine loads on newer libraries of the same major version.
    old, new = _numbers(built_with), _numbers(here)
    return old[:1] == new[:1] and new >= old


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def _option(facts: Mapping[str, Any], key: str) -> Any:
    builder = facts.get("builder")
    return builder.get(key) if isinstance(builder, Mapping) else None
