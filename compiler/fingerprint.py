"""What a build was made from, as hashes: equal fingerprints mean that there is nothing to do. No torch here."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from compiler.files import file_sha256
from compiler.sources.code import code_sha256

MISSING = "missing"


def sha256_json(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def package_versions(names: Iterable[str]) -> dict[str, str]:
    """Returns the installed versions; a package that is absent is left out."""
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


@functools.cache
def compiler_sha256() -> str:
    """Hashes the compiler's own sources: a changed pass must build again, whatever the version says."""
    root = Path(__file__).parent
    return sha256_json({str(p.relative_to(root)): file_sha256(p) for p in sorted(root.rglob("*.py"))})


def inputs_fingerprint(
    document: Mapping[str, Any], files: Mapping[str, Path], packages: Iterable[str]
) -> dict[str, Any]:
    """Returns the hashes of all that a build reads, but for the code of the factory.

    Args:
        document: the spec as loaded; comments and order of keys do not count.
        files: weight and data files, by the name that the spec gives them.
        packages: distributions whose version changes the result.
    """
    return {
        "spec": sha256_json(document),
        "files": {name: file_sha256(path) for name, path in sorted(files.items())},
        "packages": package_versions(packages),
        "python": ".".join(map(str, sys.version_info[:2])),
        "compiler": compiler_sha256(),
    }


def cpu_description() -> str:
    """Returns the processor's model and the number of cores that this process may use."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    model = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine()
    )
    return f"{model}, {len(os.sched_getaffinity(0))} cores"


def code_fingerprint(relative_paths: Iterable[str], folder: Path) -> dict[str, str]:
    """Hashes the source files that an earlier build recorded; one that is gone counts as changed."""
    return {path: code_sha256(path, folder) or MISSING for path in sorted(relative_paths)}
