"""Where a model comes from: a factory is imported, its weights are read; what is trusted and what is refused.

Only the factory that the spec names runs code. Weight files never do: safetensors are plain data, and
PyTorch files are opened with `weights_only`, with no fall-back to an unsafe load.
"""

from __future__ import annotations

import ast
import contextlib
import fnmatch
import hashlib
import importlib
import importlib.util
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compiler.errors import EnvironmentLacks, ModelRefused, one_of
from compiler.spec import ModelSpec
from compiler.yaml_reader import Node

if TYPE_CHECKING:
    import torch

# Before 2.10 a crafted file could write outside the tensors it declares, even under weights_only.
SAFE_TORCH = (2, 10)


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


def resolve_file(node: Node, reference: str, folder: Path) -> Path:
    """Returns the file that a spec refers to.

    `package:NAME/inner/path` names a file inside an installed package, found without importing it;
    anything else is a path relative to the spec's folder.
    """
    is_packaged = reference.startswith("package:")
    path = _package_file(node, reference) if is_packaged else folder / Path(reference).expanduser()
    if not path.is_file():
        node.fail(f"no such file: {reference}", hint=f"looked for {path}")
    return path


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file)


def file_digest(file: Any) -> str:
    digest = hashlib.sha256()
    while chunk := file.read(1 << 20):
        digest.update(chunk)
    return digest.hexdigest()


def load_module(spec: ModelSpec) -> torch.nn.Module:
    """Imports and calls the factory, then loads the weights strictly; the module comes back in eval mode.

    Raises:
        SpecError: the factory or the weight file does not exist.
        ModelRefused: the factory raised, or the weights do not fit the module by name and shape.
        EnvironmentLacks: a package that the factory's module needs is not installed.
    """
    import torch

    weights = spec.source.weights
    # Looked up first: a misspelt path must not cost the minute that some factories take.
    weight_file = resolve_file(spec.at("source", "weights"), weights, spec.path.parent) if weights else None
    with importable(spec.path.parent):
        module = _call_factory(spec)
    if not isinstance(module, torch.nn.Module):
        raise ModelRefused(
            f"source.factory {spec.source.factory} returned {type(module).__name__}, not a torch.nn.Module"
        )
    if weight_file is not None:
        _load_weights(module, spec, weight_file)
    return module.eval()


def factory_code(factory: str) -> dict[str, str]:
    """Returns sha256 by relative path of the source files behind a factory: its module and what that imports.

    Installed packages are left out; their versions are recorded instead. The path is relative to the
    folder that holds the top-level package, so that it means the same on another machine.
    """
    found: dict[str, str] = {}
    pending = [factory.partition(":")[0]]
    seen: set[str] = set()
    while pending:
        name = pending.pop()
        if not name or name in seen:
            continue
        seen.add(name)
        pending.append(name.rpartition(".")[0])  # importing a.b runs a/__init__.py
        path = Path(getattr(sys.modules.get(name), "__file__", None) or "")
        if path.suffix != ".py" or not path.is_file() or _is_installed(path):
            continue
        inner = name.replace(".", "/")
        is_package = path.name == "__init__.py"
        found[f"{inner}/__init__.py" if is_package else f"{inner}.py"] = file_sha256(path)
        pending += _imports(path, name if is_package else name.rpartition(".")[0])
    return found


def _is_installed(path: Path) -> bool:
    roots = {Path(p).resolve() for p in (sysconfig.get_path("purelib"), sysconfig.get_path("stdlib"))}
    return any(root in path.resolve().parents for root in roots)


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
    """Hashes a file that `factory_code` named, without importing it; None where it is gone."""
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


def _package_file(node: Node, reference: str) -> Path:
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


def _call_factory(spec: ModelSpec) -> Any:
    name, _, function = spec.source.factory.partition(":")
    node = spec.at("source", "factory")
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing == name or name.startswith(missing + "."):
            node.fail(
                f"source.factory: no module named '{missing}'",
                hint=f"modules are looked for beside the spec ({spec.path.parent}) and among installed packages",
            )
        raise EnvironmentLacks(
            f"source.factory: {name} needs the package '{missing}', which is not installed",
            hint=f"pip install {missing.split('.')[0]}",
        ) from error
    except Exception as error:
        raise ModelRefused(f"source.factory: importing {name} failed: {where_it_failed(error)}") from error
    build = getattr(module, function, None)
    if not callable(build):
        names = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        node.fail(f"source.factory: {name} has no function '{function}'; it has: {one_of(names)}")
    try:
        return build(**spec.source.args)
    except Exception as error:
        raise ModelRefused(f"source.factory: {spec.source.factory} failed: {where_it_failed(error)}") from error


def where_it_failed(error: BaseException) -> str:
    """Returns one line: the error and the innermost line of code outside installed packages."""
    text = " ".join(str(error).split())
    installed = sysconfig.get_path("purelib")
    frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if not f.filename.startswith((installed, "<")) and "/compiler/" not in f.filename
    ]
    place = f" (at {Path(frames[-1].filename).name}:{frames[-1].lineno}: {frames[-1].line})" if frames else ""
    return f"{type(error).__name__}: {text[:500]}{place}"


def _load_weights(module: torch.nn.Module, spec: ModelSpec, path: Path) -> None:
    shown = spec.source.weights
    state = _read_weights(path, str(shown))
    ignored = [k for k in state if any(fnmatch.fnmatchcase(k, p) for p in spec.source.ignore_weights)]
    for pattern in spec.source.ignore_weights:
        if not fnmatch.filter(ignored, pattern):
            spec.at("source", "ignore_weights").fail(f"source.ignore_weights: no weight matches '{pattern}'")
    state = {k: v for k, v in state.items() if k not in ignored}
    own = module.state_dict()
    missing, extra = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
    shapes = [
        f"{k} is {list(state[k].shape)} in the file and {list(own[k].shape)} in the module"
        for k in sorted(own.keys() & state.keys())
        if own[k].shape != state[k].shape
    ]
    problems = [
        *([f"missing from the file: {_some(missing)}"] if missing else []),
        *([f"not in the module: {_some(extra)}"] if extra else []),
        *shapes[:5],
    ]
    if problems:
        raise ModelRefused(
            f"source.weights {shown} does not fit the module: " + "; ".join(problems),
            hint="weights that the module does not need can be named in source.ignore_weights (a glob)",
        )
    module.load_state_dict(state)


def _read_weights(path: Path, shown: str) -> dict[str, torch.Tensor]:
    import torch

    if path.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return dict(load_file(path))
        except SafetensorError as error:
            raise ModelRefused(f"source.weights {shown} is not a valid safetensors file: {error}") from error
    if path.suffix not in (".pt", ".pth", ".bin"):
        raise ModelRefused(
            f"source.weights {shown} has the suffix '{path.suffix}'; allowed: .safetensors, .pt, .pth, .bin"
        )
    version = tuple(int(p) for p in torch.__version__.split("+")[0].split(".")[:2])
    if version < SAFE_TORCH:
        raise EnvironmentLacks(
            f"source.weights {shown} is a pickle and torch {torch.__version__} cannot open it safely (2.10 can)",
            hint="convert the weights to .safetensors, or upgrade torch",
        )
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ModelRefused(
            f"source.weights {shown} was refused: it is damaged or holds code besides tensors "
            f"({' '.join(str(error).split())[:160]})",
            hint="convert it to .safetensors in a place where you trust it",
        ) from error
    if not isinstance(state, dict) or not all(isinstance(v, torch.Tensor) for v in state.values()):
        raise ModelRefused(
            f"source.weights {shown} holds {type(state).__name__}, not a mapping from names to tensors",
            hint="save model.state_dict(), or better a .safetensors file",
        )
    return state


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
