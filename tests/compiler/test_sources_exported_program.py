"""Archives of torch.export: opened only with --trust-pickle, and held to the dims they were exported for."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

from compiler.errors import ModelkilnError, ModelRefused, SpecError
from compiler.manifest import BuildResult
from compiler.pipeline import compile_model
from compiler.repository import Repository
from compiler.spec import model_spec_from_file
from tests.compiler.opens import opens_of
from tests.compiler.test_source import Bomb
from tests.serving import run_compile

pytestmark = pytest.mark.usefixtures("exporter_library")  # once for all exports of this module

SPEC = """
name: program
source: {exported_program: model.pt2}
dims:
  batch: {min: 1, opt: 4, max: 8}
inputs:
  - {name: x, dtype: float32, shape: [batch, 16]}
outputs:
  - {name: y, dtype: float32}
"""
NOT_TRUSTED = (
    "source.exported_program model.pt2: opening an archive of torch.export can run code that is in it\n"
    "  hint: if you wrote it yourself: compile build --trust-pickle; an .onnx file needs no trust"
)


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 3)

    def forward(self, x):
        return self.layer(x)


class Scaled(nn.Module):
    def forward(self, x, *, scale, shift=None):
        return {"other": x, "y": x * scale - shift}


def _write(folder: Path, module: nn.Module, args: tuple, spec: str = SPEC, **export: object) -> Path:
    program = torch.export.export(module.eval(), args, **export)
    torch.export.save(program, folder / "model.pt2")
    (folder / "spec.yaml").write_text(spec.lstrip())
    return folder / "spec.yaml"


def _linear(folder: Path, spec: str = SPEC, low: int = 1, high: int = 8) -> Path:
    batch = torch.export.Dim("N", min=low, max=high)
    return _write(folder, Linear(), (torch.ones(3, 16),), spec, dynamic_shapes={"x": {0: batch}})


def _build(spec: Path, trust: bool = True) -> BuildResult:
    return compile_model(model_spec_from_file(spec), Repository(spec.parent / "repo"), trust_pickle=trust)


def _refused(spec: Path, kind: type[ModelkilnError] = ModelRefused, trust: bool = True) -> str:
    with pytest.raises(kind) as error:
        _build(spec, trust)
    assert not (spec.parent / "repo").exists()
    return str(error.value)


def test_an_archive_is_built_through_the_command_with_trust_and_the_manifest_says_so(tmp_path):
    spec, repository = _linear(tmp_path), tmp_path / "repo"
    refused = run_compile("build", spec, "-r", repository)
    assert refused.returncode == 1 and refused.stderr == f"error: {NOT_TRUSTED}\n"
    done = run_compile("build", spec, "-r", repository, "--trust-pickle")
    assert done.returncode == 0, done.stderr
    warning = "warning: model.pt2 was opened with --trust-pickle: whoever wrote it could run code on this machine"
    assert warning in done.stderr
    manifest = json.loads((repository / "program" / "1" / "manifest.json").read_text())
    assert manifest["source"]["trusted"] == ["model.pt2"] and manifest["source"]["notes"] == [warning]
    assert manifest["command"] == "compile build spec.yaml --trust-pickle"
    assert "up to date" in run_compile("build", spec, "-r", repository).stdout


def _with_pickle(path: Path, member: str, payload: object) -> None:
    """Replaces one member of the archive by a pickle."""
    buffer = io.BytesIO()
    torch.save(payload, buffer)
    with zipfile.ZipFile(path) as archive:
        members = {i.filename: archive.read(i) for i in archive.infolist()}
    name = next(n for n in members if n.endswith(member))
    members[name] = buffer.getvalue()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for key, value in members.items():
            archive.writestr(key, value)


def test_i01_i02_an_archive_is_not_opened_without_trust_since_torch_falls_back_to_an_unsafe_load(tmp_path):
    """The proof of what docs/design.md says: torch.export.load runs the pickle that weights_only refused."""
    spec, created = _linear(tmp_path), tmp_path / "created"
    _with_pickle(tmp_path / "model.pt2", "sample_inputs/model.pt", ((Bomb(created),), {}))
    with opens_of(tmp_path / "model.pt2") as events:
        # Hashed for the fingerprint, never parsed.
        assert _refused(spec, trust=False) == NOT_TRUSTED
    assert events and not created.exists()
    with pytest.raises(Exception):  # noqa: B017  torch complains only after the code ran
        torch.export.load(tmp_path / "model.pt2")
    assert created.exists()


def test_inputs_go_in_by_name_and_outputs_come_out_by_key(tmp_path):
    batch = torch.export.Dim("N", min=1, max=8)
    inputs = "\n".join(f"  - {{name: {n}, dtype: float32, shape: [batch, 4]}}" for n in ("shift", "x", "scale"))
    spec = _write(
        tmp_path,
        Scaled(),
        (torch.ones(3, 4),),
        SPEC.replace("  - {name: x, dtype: float32, shape: [batch, 16]}", inputs),
        kwargs={"shift": torch.ones(3, 4), "scale": torch.ones(3, 4)},
        dynamic_shapes={n: {0: batch} for n in ("x", "shift", "scale")},
    )
    result = _build(spec)
    session = onnxruntime.InferenceSession(str(result.published.folder / "model.onnx"))
    values = {name: np.full((2, 4), v, np.float32) for name, v in (("x", 3), ("scale", 5), ("shift", 1))}
    assert (session.run(["y"], values)[0] == 14).all()
    assert [i.name for i in session.get_inputs()] == ["shift", "x", "scale"]


def test_a_dim_that_the_program_fixes_is_refused_by_name_and_number(tmp_path):
    assert _refused(_write(tmp_path, Linear(), (torch.ones(3, 16),))) == (
        "dim 'batch' is the fixed number 3 in the program (axis 0 of 'x')\n"
        "  hint: export it with dynamic_shapes and torch.export.Dim('batch', min=1, max=8)"
    )


@pytest.mark.parametrize(("low", "high"), [(2, 8), (1, 6)])
def test_a_dim_that_goes_beyond_the_program_is_refused_by_name_and_range(tmp_path, low, high):
    assert _refused(_linear(tmp_path, low=low, high=high)) == (
        f"dim 'batch' is 1..8 in the spec, but the program was exported for {low} to {high} (axis 0 of 'x')\n"
        "  hint: export it with torch.export.Dim('batch', min=1, max=8), or narrow the dim in the spec"
    )


def test_two_dims_that_are_one_in_the_program_are_refused(tmp_path):
    side = torch.export.Dim("N", min=1, max=8)
    spec = SPEC.replace("[batch, 16]", "[batch, length]").replace("inputs:", "  length: {max: 8}\ninputs:")
    path = _write(tmp_path, nn.ReLU(), (torch.ones(3, 3),), spec.replace("name: x", "name: input"),
                  dynamic_shapes={"input": {0: side, 1: side}})  # fmt: skip
    assert _refused(path).startswith("the dims 'batch' and 'length' are one dim in the program (axis 1 of 'input')")


def test_names_types_and_sizes_are_those_of_the_program(tmp_path):
    spec = _linear(tmp_path, SPEC.replace("name: x", "name: pixels"))
    assert _refused(spec, SpecError) == f"{spec}:6: the program has no input 'pixels'; its inputs: x"
    spec = _linear(tmp_path, SPEC.replace("x, dtype: float32", "x, dtype: float16"))
    assert _refused(spec, SpecError) == f"{spec}:6: input 'x' is float32 in the program, the spec says float16"
    assert _refused(_linear(tmp_path, SPEC.replace("[batch, 16]", "[batch, 8]"))) == (
        "'x' axis 1: the spec says 8, the program 16"
    )
    assert _refused(_linear(tmp_path, SPEC.replace("[batch, 16]", "[batch, 16, 1]"))) == (
        "'x' has 2 axes in the program, the spec says ['batch', 16, 1]"
    )


@pytest.mark.parametrize("content", [b"", b"\x80\x04N."], ids=["empty", "pickle"])
def test_what_is_no_archive_is_refused(tmp_path, content):
    spec = _linear(tmp_path)
    (tmp_path / "model.pt2").write_bytes(content)
    assert _refused(spec) == "source.exported_program model.pt2 is not an archive of torch.export: it is no zip file"


def test_a_cut_archive_is_refused(tmp_path):
    spec = _linear(tmp_path)
    with zipfile.ZipFile(tmp_path / "model.pt2", "w") as archive:
        archive.writestr("model/archive_version", "0")
    assert _refused(spec).startswith(
        "source.exported_program model.pt2 is damaged, or was saved by another version of torch than "
    )
