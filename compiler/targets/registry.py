"""What a target is, and which there are. One file per target beside this one."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compiler.dtypes import AnyArray

if TYPE_CHECKING:
    import onnx_ir as ir

    from compiler.spec import ModelSpec, Serving

# The graph that an engine was built from, kept beside it: parity is judged on it where the engine cannot run.
SOURCE_FILE = "source.onnx"

# Runs the file that ships: arrays by input name in, arrays by output name out.
Runner = Callable[[Mapping[str, AnyArray]], dict[str, AnyArray]]


@dataclass(frozen=True)
class ArtifactTensor:
    """An input or output as the shipped file declares it; a dim is a number, a name, or `?`."""

    name: str
    onnx_type: int
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class Target:
    """An engine that `compile` can build for.

    Attributes:
        backend: the name of the Triton backend that serves it.
        model_file: the file that Triton expects in a version folder.
        packages: distributions whose version changes what is built.
        write: writes the served files into a folder; returns what a manifest should say of them (an engine's
            version, compute capability and profiles). Reads dims and precision from the spec.
        open: opens the written file as it will be served: (folder, threads, what `write` returned) -> runner, or
            None where this machine cannot run it (an engine for a GPU that is not here).
        interface: reads inputs and outputs back from the written file.
        parameters: config.pbtxt's `parameters` for the backend, from the serving options and what `write` returned.
        computed: precisions that the engine makes of an fp32 graph by itself; all others are written into the graph.
        limits: what it is known to compute otherwise than PyTorch, told where parity fails.
        instance_kind: where Triton runs it, `KIND_CPU` or `KIND_GPU`.
        require: raises EnvironmentLacks where this machine cannot build it; called before anything slow.
        machine: what of this machine changes the file, for the build's key.
    """

    name: str
    backend: str
    model_file: str
    packages: tuple[str, ...]
    write: Callable[[ir.Model, Path, ModelSpec], dict[str, Any]]
    open: Callable[[Path, int, Mapping[str, Any]], Runner | None]
    interface: Callable[[Path], tuple[tuple[ArtifactTensor, ...], tuple[ArtifactTensor, ...]]]
    parameters: Callable[[Serving, Mapping[str, Any]], dict[str, str]] = lambda serving, facts: {}
    computed: tuple[str, ...] = ()
    limits: str = ""
    instance_kind: str = "KIND_CPU"
    require: Callable[[], None] = lambda: None
    machine: Callable[[], dict[str, Any]] = dict


# Each module defines TARGET; it is imported only when its target is asked for, since it may need heavy packages.
_MODULES = {
    "onnxruntime": "compiler.targets.onnxruntime",
    "openvino": "compiler.targets.openvino",
    "tensorrt": "compiler.targets.tensorrt",
    "tensorrt-rtx": "compiler.targets.tensorrt_rtx",
}
TARGET_NAMES = tuple(_MODULES)


def target_named(name: str) -> Target:
    """Returns the target of that name, one of TARGET_NAMES."""
    target: Target = importlib.import_module(_MODULES[name]).TARGET
    return target
