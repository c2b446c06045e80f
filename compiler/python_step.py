"""A hand-written Triton Python model, published with the same care as a compiled one; its code is not run here."""

from __future__ import annotations

import ast
import importlib.metadata
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compiler.build_key import up_to_date
from compiler.errors import EnvironmentLacks, one_of
from compiler.files import resolve_file
from compiler.fingerprint import inputs_fingerprint
from compiler.manifest import BuildResult, manifest_head
from compiler.progress import Stage, silent_stage
from compiler.repository import MANIFEST_FILE, Repository
from compiler.spec import Serving, model_name, read_serving
from compiler.tensors import (
    BATCH_DIM,
    Dim,
    OutputSpec,
    check_batch_axis,
    read_dims,
    read_output,
    refuse_duplicates,
)
from compiler.triton_config import TensorConfig, add_serving, base_config, text_from_config
from compiler.yaml_reader import Node

MODEL_FILE = "model.py"
NUM_STAGES = 1


@dataclass(frozen=True)
class PythonStepSpec:
    """A Python model: its code, the files it reads, its tensors and parameters.

    Attributes:
        code: the file that becomes `model.py`.
        files: files to put beside it, by the name they get.
        requires: distributions that the code imports.
    """

    path: Path
    name: str
    code: Path
    files: dict[str, Path]
    requires: tuple[str, ...]
    parameters: dict[str, str]
    dims: dict[str, Dim]
    inputs: tuple[OutputSpec, ...]
    outputs: tuple[OutputSpec, ...]
    serving: Serving
    document: dict[str, Any] = field(compare=False)

    @property
    def max_batch_size(self) -> int:
        batch = self.dims.get(BATCH_DIM)
        return batch.max if batch else 0


def python_step_from_node(root: Node, path: Path) -> PythonStepSpec:
    """Validates the spec of a Python step.

    Raises:
        SpecError: with `file:line`.
        EnvironmentLacks: a package that the step requires is not installed.
    """
    table = root.table(
        "the spec",
        required=("name", "source", "inputs", "outputs"),
        optional=("dims", "parameters", "serving"),
    )
    source = table["source"].table("source", required=("python",), optional=("files", "requires"))
    code = resolve_file(source["python"], source["python"].string("source.python"), path.parent)
    _check_code(source["python"], code)
    files, requires, parameters = source.get("files"), source.get("requires"), table.get("parameters")
    dims = read_dims(table)
    inputs = _tensors(table["inputs"], dims, "input")
    outputs = _tensors(table["outputs"], dims, "output")
    check_batch_axis(table, dims, (*inputs, *outputs))
    return PythonStepSpec(
        path=path,
        name=model_name(table["name"]),
        code=code,
        files=_step_files(files, path.parent) if files else {},
        requires=_requirements(requires) if requires else (),
        parameters={k: _text(k, v) for k, v in parameters.mapping("parameters").items()} if parameters else {},
        dims=dims,
        inputs=inputs,
        outputs=outputs,
        serving=read_serving(table.get("serving")),
        document=root.plain(),
    )


def publish_step(
    spec: PythonStepSpec, repository: Repository, *, force: bool = False, stage: Stage = silent_stage
) -> BuildResult:
    """Publishes a Python step; does nothing where its newest version is already that."""
    started = time.monotonic()
    repository.check_publishable(spec.name)
    files = {MODEL_FILE: spec.code, **spec.files}
    fingerprint = inputs_fingerprint(spec.document, files, spec.requires)
    if not force and (current := up_to_date(repository, spec.name, fingerprint, spec.path.parent)):
        return BuildResult(current, built=False, seconds=time.monotonic() - started)
    with stage("publish") as log, tempfile.TemporaryDirectory(prefix="modelkiln-") as work:
        for name, source in files.items():
            shutil.copyfile(source, Path(work, name))
        config = base_config(
            spec.name,
            "python",
            spec.max_batch_size,
            _configs(spec.inputs, spec),
            _configs(spec.outputs, spec),
        )
        add_serving(config, spec.serving, spec.parameters)
        manifest = {**manifest_head(spec.document, fingerprint, {}, spec.path), "backend": "python"}
        published = repository.publish(spec.name, text_from_config(config), Path(work), manifest)
        log.note(str(published.folder))
    return BuildResult(published, built=True, seconds=time.monotonic() - started)


def _check_code(node: Node, path: Path) -> None:
    """Parses the code without running it: a server would say the same only when it starts."""
    try:
        tree = ast.parse(path.read_bytes(), filename=path.name)
    except SyntaxError as error:
        node.fail(f"{path.name}:{error.lineno}: not valid Python: {error.msg}")
    classes = [n.name for n in tree.body if isinstance(n, ast.ClassDef)]
    if "TritonPythonModel" not in classes:
        node.fail(f"{path.name} has no class TritonPythonModel; its classes: {one_of(classes)}")


def _tensors(node: Node, dims: dict[str, Dim], what: str) -> tuple[OutputSpec, ...]:
    tensors = tuple(read_output(item, dims, what) for item in node.items(f"{what}s"))
    for tensor, item in zip(tensors, node.items(f"{what}s"), strict=True):
        if tensor.dtype is None or tensor.shape is None:
            item.fail(
                f"{what} '{tensor.name}' of a Python step needs dtype and shape: there is no graph to read them from"
            )
    refuse_duplicates(node, [t.name for t in tensors], what)
    return tensors


def _step_files(node: Node, folder: Path) -> dict[str, Path]:
    files = {}
    for name, child in node.mapping("source.files").items():
        if name != Path(name).name or name in (MODEL_FILE, MANIFEST_FILE) or name.startswith("."):
            child.fail(
                f"source.files: {name!r} is not a plain file name, or is one that the version folder has already"
            )
        files[name] = resolve_file(child, child.string(f"source.files.{name}"), folder)
    return files


def _requirements(node: Node) -> tuple[str, ...]:
    names = []
    for item in node.items("source.requires"):
        name = item.string("an entry of source.requires")
        try:
            importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            raise EnvironmentLacks(
                f"{item.file}:{item.line}: the step needs the package '{name}', which is not installed",
                hint=f"pip install {name}",
            ) from None
        names.append(name)
    return tuple(names)


def _text(key: str, node: Node) -> str:
    value = node.value
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        node.fail(f"parameter '{key}' must be text or a number; Triton passes every parameter as text")
    return str(value)


def _configs(tensors: Sequence[OutputSpec], spec: PythonStepSpec) -> list[TensorConfig]:
    configs = []
    for tensor in tensors:
        assert tensor.dtype is not None and tensor.shape is not None
        shape = tensor.shape[1:] if spec.max_batch_size else tensor.shape
        dims = tuple(d if isinstance(d, int) else -1 for d in shape)
        configs.append(TensorConfig(tensor.name, tensor.dtype.triton, dims))
    return configs
