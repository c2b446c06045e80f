"""A function that a spec names, and the source files behind it: found after it ran, hashed without importing."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.metadata
import importlib.util
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

from compiler.errors import EnvironmentLacks, ModelRefused, one_of, where_it_failed
from compiler.files import file_sha256
from compiler.yaml_reader import Node

PACKAGE = "package:"


@contextlib.contextmanager
def importable(folder: Path) -> Iterator[None]:
    """Makes modules beside the spec importable, as Python does for a script's own folder."""
    entry = str(folder.resolve())
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(entry)


def function_named(node: Node, key: str, reference: str, folder: Path) -> Callable[..., Any]:
    """Imports and returns the function that a spec names; call it within `importable`.

    Args:
        node: where the spec names it.
        key: the spec's key, for messages.
        reference: `module:function`.
        folder: of the spec.

    Raises:
        SpecError: there is no such module or function.
        ModelRefused: the module raised.
        EnvironmentLacks: a package that the module needs is not installed.
    """
    name, _, function = reference.partition(":")
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing == name or name.startswith(missing + "."):
            node.fail(
                f"{key}: no module named '{missing}'",
                hint=f"modules are looked for beside the spec ({folder}) and among installed packages",
            )
        raise EnvironmentLacks(
            f"{key}: {name} needs the package '{missing}', which is not installed",
            hint=f"pip install {missing.split('.')[0]}",
        ) from error
    except Exception as error:
        raise ModelRefused(f"{key}: importing {name} failed: {where_it_failed(error)}") from error
    found = getattr(module, function, None)
    if not callable(found):
        names = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        node.fail(f"{key}: {name} has no function '{function}'; it has: {one_of(names)}")
    return cast("Callable[..., Any]", found)


def factory_code(factory: str) -> dict[str, str]:
    """Returns what a function of the user's runs: its module and what that imports, each with what identifies it.

    Source files stand by their path with their sha256. The path is relative to the folder that holds the top-level
    package, so that it means the same on another machine. Installed packages stand by `package:NAME` with a version.
    """
    found: dict[str, str] = {}
    installed: set[str] = set()
    pending = [factory.partition(":")[0]]
    seen: set[str] = set()
    while pending:
        name = pending.pop()
        if not name or name in seen:
            continue
        seen.add(name)
        pending.append(name.rpartition(".")[0])  # importing a.b runs a/__init__.py
        path = Path(getattr(sys.modules.get(name), "__file__", None) or "")
        if _is_below(path, "purelib"):
            installed.add(name.partition(".")[0])
        if path.suffix != ".py" or not path.is_file() or _is_below(path, "purelib") or _is_below(path, "stdlib"):
            continue
        inner = name.replace(".", "/")
        is_package = path.name == "__init__.py"
        found[f"{inner}/__init__.py" if is_package else f"{inner}.py"] = file_sha256(path)
        pending += _imports(path, name if is_package else name.rpartition(".")[0])
    return {**found, **_versions(installed)}


def _is_below(path: Path, kind: str) -> bool:
    return Path(sysconfig.get_path(kind)).resolve() in path.resolve().parents


def _versions(modules: set[str]) -> dict[str, str]:
    """Returns the versions of the distributions that top-level modules come from."""
    owners = importlib.metadata.packages_distributions()
    names = {name for module in modules for name in owners.get(module, ())}
    return {f"{PACKAGE}{name}": importlib.metadata.version(name) for name in sorted(names)}


def _imports(path: Path, package: str) -> list[str]:
    """Returns the names of the modules that a source file imports, anywhere in it."""
    names = []
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*parents, *([node.module] if node.module else [])])
            # `from a import b`: b may be a module or a name in a; what is no module is skipped later.
            names += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return names


def code_sha256(relative: str, folder: Path) -> str | None:
    """Identifies anew what `factory_code` named, without importing it; None where it is gone."""
    if relative.startswith(PACKAGE):
        try:
            return importlib.metadata.version(relative.removeprefix(PACKAGE))
        except (importlib.metadata.PackageNotFoundError, ValueError):
            return None
    top, _, rest = relative.partition("/")
    # Only a plain name is looked up: finding "a.b" would import a.
    if not top.removesuffix(".py").isidentifier() or ".." in rest.split("/"):
        return None
    with importable(folder):
        try:
            found = importlib.util.find_spec(top.removesuffix(".py"))
        except (ImportError, ValueError):
            return None
    if found is None:
        return None
    if not rest:
        candidates = [Path(found.origin)] if found.origin else []
    else:
        candidates = [Path(root) / rest for root in found.submodule_search_locations or ()]
    return next((file_sha256(p) for p in candidates if p.is_file()), None)
