"""What a target is, and which there are. One file per target beside this one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from compiler.dtypes import AnyArray

if TYPE_CHECKING:
    import onnx_ir as ir

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
        write: writes the graph's files into a folder.
        open: opens the written file as it will be served: (folder, threads) -> runner.
        interface: reads inputs and outputs back from the written file.
    """

    name: str
    backend: str
    model_file: str
    packages: tuple[str, ...]
    write: Callable[[ir.Model, Path], None]
    open: Callable[[Path, int], Runner]
    interface: Callable[[Path], tuple[tuple[ArtifactTensor, ...], tuple[ArtifactTensor, ...]]]


def target_named(name: str) -> Target:
    """Returns the target; its module is imported only now, since it may need heavy packages."""
    if name == "onnxruntime":
        from compiler.targets.onnxruntime import ONNXRUNTIME

        return ONNXRUNTIME
    raise KeyError(name)
