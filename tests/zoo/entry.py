"""What a model of the zoo is: a factory, its spec, and what `compile build` must make of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import nn


@dataclass(frozen=True)
class Entry:
    """One model as its user would hand it over.

    Attributes:
        build: the factory; found again by its module and name.
        inputs: one line of YAML for each input.
        outputs: one line of YAML for each output.
        dims: one line of YAML for each dim.
        refused: words that the refusal must hold; empty where the model is built and proved.
        more: further lines of the spec.
    """

    build: Callable[[], nn.Module]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...] = ("{name: y}",)
    dims: tuple[str, ...] = ("batch: {max: 5}",)
    refused: tuple[str, ...] = ()
    more: str = ""

    @property
    def name(self) -> str:
        return self.build.__name__

    def write(self, folder: Path, target: str, precision: str = "fp32", more: str = "") -> Path:
        """Writes the spec into a folder; returns its path."""
        dims = "dims:\n" + "".join(f"  {line}\n" for line in self.dims) if self.dims else ""
        text = (
            f"name: {self.name.lower()}\n"
            f"source: {{factory: '{self.build.__module__}:{self.name}'}}\n"
            f"{dims}"
            "inputs:\n" + "".join(f"  - {line}\n" for line in self.inputs) + "outputs:\n"
            "" + "".join(f"  - {line}\n" for line in self.outputs) + f"target: {target}\nprecision: {precision}\n"
            f"serving: {{threads: 1}}\n{self.more}{more}"
        )
        path = folder / "spec.yaml"
        path.write_text(text)
        return path


def floats(name: str = "x", shape: str = "batch, 8", more: str = "") -> str:
    return f"{{name: {name}, dtype: float32, shape: [{shape}]{more}}}"


def ids(name: str = "ids", shape: str = "batch, length", high: int = 30, low: int = 0, dtype: str = "int64") -> str:
    return f"{{name: {name}, dtype: {dtype}, shape: [{shape}], range: [{low}, {high}]}}"


def padding(name: str = "mask", dtype: str = "int64") -> str:
    return f"{{name: {name}, dtype: {dtype}, shape: [batch, length], values: padding_mask}}"
