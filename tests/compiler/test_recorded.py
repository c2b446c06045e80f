from __future__ import annotations

import json

import numpy as np
import onnx
import pytest

from compiler.errors import RepositoryError, UsageError
from compiler.pipeline import compile_model
from compiler.recorded import verify_again
from compiler.repository import Repository
from compiler.spec import model_spec_from_file
from tests.compiler.test_cli import MODEL
from tests.serving import run_compile

pytestmark = pytest.mark.usefixtures("exporter_library")  # once for all exports of this module


@pytest.fixture
def store(project) -> Repository:
    path = project(MODEL)
    repository = Repository(path.parent / "repo")
    compile_model(model_spec_from_file(path), repository)
    return repository


def test_a_version_is_proved_again_without_its_source(store):
    for left in store.path.parent.glob("*.*"):
        left.unlink()  # the spec and the module
    report = verify_again(store, store.find("small"))
    assert report.comparisons and not report.failures
    assert {c.case for c in report.comparisons} == set(store.find("small").manifest["references"])


def test_a_changed_weight_is_found_even_where_the_hashes_were_changed_with_it(store):
    """Whoever replaces the model and its hash cannot replace what it should answer without being seen."""
    published = store.find("small")
    path = published.folder / "model.onnx"
    proto = onnx.load(str(path))
    weight = proto.graph.initializer[0]
    weight.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(weight) * 1.01, weight.name))
    onnx.save(proto, str(path))
    with pytest.raises(RepositoryError, match=r"model\.onnx is not the file that was published"):
        verify_again(store, published)
    manifest = json.loads((published.folder / "manifest.json").read_text())
    from compiler.files import file_sha256

    manifest["files"]["model.onnx"] = {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
    (published.folder / "manifest.json").write_text(json.dumps(manifest))
    assert verify_again(store, store.find("small")).failures


def test_inputs_that_cannot_be_made_again_are_said_so(store):
    published = store.find("small")
    name = next(iter(published.manifest["references"]))
    published.manifest["references"][name] = "0" * 64
    with pytest.raises(RepositoryError, match="cannot be made again"):
        verify_again(store, published)


def test_references_hold_no_pickles(store):
    with np.load(store.find("small").folder / "reference.npz", allow_pickle=False) as arrays:
        assert all(arrays[key].dtype == np.float32 for key in arrays.files)


def test_the_command_prints_every_case_and_exits_1_on_a_failure(store):
    done = run_compile("verify", "small", "-r", store.path)
    assert done.returncode == 0 and done.stdout.endswith("comparisons failed\n") and "smallest[batch=1]" in done.stdout
    result = json.loads(run_compile("verify", "small:1", "-r", store.path, "--json").stdout)
    assert result["passed"] and result["version"] == 1 and result["parity"]["worst_cosine"] > 0.99999
    (store.path / "small" / "1" / "model.onnx").write_bytes(b"cut")
    assert run_compile("verify", "small", "-r", store.path).returncode == 1


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("smal", r"no model 'smal' in .* \(did you mean 'small'\?\); it has: small"),
        ("small:2", r"small has no version '2'; it has: 1"),
        ("small:../1", r"small has no version '\.\./1'"),
        ("../small", r"no model '\.\./small'"),
    ],
)
def test_a_name_that_is_not_there(store, reference, message):
    with pytest.raises(UsageError, match=message):
        store.find(reference)
