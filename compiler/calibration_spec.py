"""The spec's `calibration` key: where real inputs for int8 come from, and how ranges are taken from them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from compiler.files import resolve_file
from compiler.yaml_reader import Node

if TYPE_CHECKING:
    from compiler.spec import ModelSpec

METHODS = ("minmax", "percentile")
DEFAULT_PERCENTILE = 99.99
_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


@dataclass(frozen=True)
class CalibrationSpec:
    """Where samples come from, and how ranges are taken.

    Attributes:
        data: a folder of `.npz` files, one such file, or `module:function`, called without arguments.
        files: more files that the function reads; they count for "nothing changed".
        method: `minmax` or `percentile`.
        percentile: share of the values, in percent, that a range must hold with `percentile`.
    """

    data: str
    files: tuple[str, ...] = ()
    method: str = METHODS[0]
    percentile: float = DEFAULT_PERCENTILE

    @property
    def is_function(self) -> bool:
        """Whether the samples come from Python code."""
        return bool(_FUNCTION.fullmatch(self.data))


def read_calibration(node: Node | None) -> CalibrationSpec | None:
    """Reads the key: the data alone, or a mapping.

    Raises:
        SpecError: with `file:line`, what was seen and what is allowed.
    """
    if node is None:
        return None
    if isinstance(node.value, str):
        return CalibrationSpec(node.string("calibration"))
    table = node.table("calibration", required=("data",), optional=("files", "method", "percentile"))
    files, method, percentile = (table.get(key) for key in ("files", "method", "percentile"))
    chosen = method.choice("calibration.method", METHODS) if method else METHODS[0]
    if percentile and chosen != "percentile":
        percentile.fail("calibration.percentile needs method: percentile")
    found = CalibrationSpec(
        data=table["data"].string("calibration.data"),
        files=tuple(f.string("calibration.files") for f in files.items("calibration.files")) if files else (),
        method=chosen,
        percentile=percentile.number("calibration.percentile", 90, 100) if percentile else DEFAULT_PERCENTILE,
    )
    if files and not found.is_function:
        files.fail("calibration.files are what a function reads, and calibration.data is a path")
    return found


def calibration_files(spec: ModelSpec) -> dict[str, Path]:
    """Returns the files behind the calibration data by name, for the build's key.

    Raises:
        SpecError: there is no such folder or file, or no `.npz` in it.
    """
    given = spec.calibration
    if given is None:
        return {}
    folder = spec.path.parent
    if given.is_function:
        nodes = spec.at("calibration", "files").value if given.files else ()
        return {name: resolve_file(node, name, folder) for name, node in zip(given.files, nodes, strict=True)}
    path = folder / given.data
    files = sorted(path.glob("*.npz")) if path.is_dir() else [path] if path.is_file() else []
    if not files:
        spec.at("calibration").fail(
            f"calibration: no .npz files in {given.data}", hint=f"looked in {path}; a function is written module:name"
        )
    return {f"{given.data}/{file.name}": file for file in files}
