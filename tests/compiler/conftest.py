"""Specs and small models for the compiler's tests: each test writes the files that a user would."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.exporter_library import read_once

SPEC = """
name: small
source: {factory: FACTORY}
dims:
  batch: {min: 1, opt: 4, max: 8}
inputs:
  - {name: x, dtype: float32, shape: [batch, 16]}
outputs:
  - {name: y, dtype: float32}
"""


@pytest.fixture(scope="module")
def exporter_library() -> Iterator[None]:
    """Each export of a module in less time: see tests/exporter_library.py."""
    with read_once():
        yield


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Returns a function that writes `code` as a module and a spec beside it, and returns the spec's path.

    Each test gets a module of its own name: Python keeps imported modules by name.
    """
    name = f"model_{abs(hash(tmp_path)) % 10**10}"

    def write(code: str, spec: str = SPEC, function: str = "build") -> Path:
        source = "import torch\nfrom torch import nn\n\n" + textwrap.dedent(code)
        (tmp_path / f"{name}.py").write_text(source)
        path = tmp_path / "spec.yaml"
        path.write_text(textwrap.dedent(spec).replace("FACTORY", f"{name}:{function}").lstrip())
        return path

    yield write
    sys.modules.pop(name, None)
