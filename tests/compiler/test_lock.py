"""`--lock` and `--locked`: a build that comes out the same on another day, or is refused with what differs."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest

from compiler.lock import differences
from compiler.precision.search import SearchResult, find_holds, search_from_json
from tests.compiler.conftest import SPEC
from tests.compiler.test_cli import MODEL
from tests.compiler.test_side_by_side import STEP
from tests.serving import run_compile


def test_differences_are_told_by_path_and_value():
    locked = {"spec": {"opset": 20}, "packages": {"torch": "2.12", "old": "1"}, "files": {"w": "a" * 64}, "same": [1]}
    now = {"spec": {"opset": 18}, "packages": {"torch": "2.13", "new": "2"}, "files": {"w": "b" * 64}, "same": [1]}
    assert differences(locked, now) == [
        "files.w: aaaaaaaaaaaa... in the lock, bbbbbbbbbbbb... here",
        "packages.new: nothing in the lock, 2 here",
        "packages.old: 1 in the lock, nothing here",
        "packages.torch: 2.12 in the lock, 2.13 here",
        "spec.opset: 20 in the lock, 18 here",
    ]
    assert differences(locked, locked) == []


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """A model that was chosen among all targets and locked."""
    folder = tmp_path_factory.mktemp("lock")
    (folder / "lock_model.py").write_text("import torch\nfrom torch import nn\n" + MODEL)
    (folder / "spec.yaml").write_text(SPEC.replace("FACTORY", "lock_model:build").lstrip() + "target: auto\n")
    done = run_compile("build", folder / "spec.yaml", "-r", folder / "repo", "--lock", fresh=True)
    assert done.returncode == 0 and "compare the candidates" in done.stderr, done.stderr
    return folder


@pytest.fixture
def locked(template, tmp_path):
    """A copy with its lock and no repository: (folder, run)."""
    shutil.copytree(template, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("repo"))

    def run(*extra):
        return run_compile("build", tmp_path / "spec.yaml", "-r", tmp_path / "repo", "--locked", *extra)

    return tmp_path, run


def _edit(folder, change):
    path = folder / "spec.lock"
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def test_the_choice_is_built_again_without_a_search_and_comes_out_the_same(template, locked):
    folder, run = locked
    done = run("--no-cache")
    assert done.returncode == 0, done.stderr
    assert "compare the candidates" not in done.stderr and "[5/5] publish" in done.stderr
    lock = json.loads((folder / "spec.lock").read_text())
    manifest = json.loads((folder / "repo" / "small" / "1" / "manifest.json").read_text())
    assert lock["choice"] == {"target": manifest["target"], "precision": "fp32"}
    assert len(manifest["candidates"]) == 1
    for name in lock["artifacts"]:
        assert (folder / "repo/small/1" / name).read_bytes() == (template / "repo/small/1" / name).read_bytes()
    assert set(lock["artifacts"]) == {f for f in manifest["files"] if f != "reference.npz"}
    assert "up to date" in run().stdout


def test_the_other_choice_in_the_lock_replaces_a_version_that_is_up_to_date(template, tmp_path):
    shutil.copytree(template, tmp_path, dirs_exist_ok=True)
    chosen = json.loads((tmp_path / "spec.lock").read_text())["choice"]["target"]
    other = "openvino" if chosen == "onnxruntime" else "onnxruntime"
    arguments = ("build", tmp_path / "spec.yaml", "-r", tmp_path / "repo")
    # A lock of the other target, made where that one was the fastest.
    done = run_compile("build", tmp_path / "spec.yaml", "-r", tmp_path / "there", "--target", other, "--lock")
    assert done.returncode == 0, done.stderr
    _edit(tmp_path, lambda d: d["spec"].update(target="auto"))
    done = run_compile(*arguments, "--locked")
    assert done.stdout.startswith("small version 2: built"), done.stderr
    assert json.loads((tmp_path / "repo/small/2/manifest.json").read_text())["target"] == other


def test_the_same_version_gives_the_same_lock(template, tmp_path):
    shutil.copytree(template, tmp_path, dirs_exist_ok=True)
    done = run_compile("build", tmp_path / "spec.yaml", "-r", tmp_path / "repo", "--lock")
    assert "up to date" in done.stdout
    assert (tmp_path / "spec.lock").read_bytes() == (template / "spec.lock").read_bytes()


def test_what_the_search_for_nodes_to_hold_found_is_taken_from_the_lock(locked):
    folder, run = locked
    flags = ("--target", "onnxruntime", "--precision", "int8_dynamic")
    made = run_compile("build", folder / "spec.yaml", "-r", folder / "first", *flags, "--lock")
    assert made.returncode == 0, made.stderr
    assert "agreement with fp32 0.12345" not in made.stderr
    # A figure that no search would give shows that none was made.
    _edit(folder, lambda d: d["search"].update(score=0.12345))
    done = run(*flags, "--no-cache")
    assert done.returncode == 0 and "agreement with fp32 0.12345 on " in done.stderr, done.stderr
    first, again = folder / "first/small/1/model.onnx", folder / "repo/small/1/model.onnx"
    assert first.read_bytes() == again.read_bytes()


def test_a_known_search_is_taken_as_it_is_and_only_for_nodes_that_are_there():
    def asked(held):
        raise AssertionError("the judge was asked")

    known = SearchResult(("b",), 0.99, 0.9, 7, True, True, {"a": 0.01, "b": 0.2})
    assert find_holds(asked, asked, ["a", "b"], 0.98, 10, known=known) is known
    with pytest.raises(AssertionError, match="the judge was asked"):
        find_holds(asked, asked, ["a", "c"], 0.98, 10, known=known)
    assert search_from_json(json.loads(json.dumps(known.to_json()))) == replace(known, losses={"b": 0.2})


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        (
            lambda folder: _edit(folder, lambda d: d["made_from"]["packages"].update(torch="1.0")),
            "made_from.packages.torch: 1.0 in the lock, ",
        ),
        (
            lambda folder: (folder / "lock_model.py").write_text("import torch\nfrom torch import nn\n#" + MODEL),
            "code.lock_model.py: ",
        ),
        (
            lambda folder: (folder / "spec.yaml").write_text(
                (folder / "spec.yaml").read_text().replace("max: 8", "max: 9")
            ),
            "spec.dims.batch.max: 8 in the lock, 9 here",
        ),
        (
            lambda folder: _edit(folder, lambda d: d["made_from"].update(python="2.7")),
            "made_from.python: 2.7 in the lock, 3.",
        ),
    ],
    ids=["package", "code", "spec", "python"],
)
def test_what_differs_is_refused_before_anything_is_loaded(locked, change, difference):
    folder, run = locked
    change(folder)
    done = run("--json")
    assert done.returncode == 1 and not (folder / "repo").exists() and "load the model" not in done.stderr
    result = json.loads(done.stdout)
    assert result["error"]["kind"] == "locked" and "spec.lock does not allow this build:" in result["error"]["message"]
    assert [d for d in result["differences"] if d.startswith(difference)] != []
    assert result["models"] == []


def test_other_bytes_are_refused_before_they_are_published(locked):
    folder, run = locked
    _edit(folder, lambda d: d["artifacts"].update({name: "0" * 64 for name in d["artifacts"]}))
    _edit(folder, lambda d: d.update(processor="another one"))
    done = run()
    assert done.returncode == 1 and not (folder / "repo" / "small").exists()
    assert ": 000000000000... in the lock, " in done.stderr
    assert "processor: another one in the lock, " in done.stderr


def test_another_processor_alone_is_no_difference(locked):
    folder, run = locked
    _edit(folder, lambda d: d.update(processor="another one"))
    assert run().returncode == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "spec.lock does not exist\n  hint: compile build "),
        ("{", "spec.lock cannot be read: "),
        ("[]", "spec.lock is not a lock of schema 1"),
        ('{"schema": 1}', "spec.lock has no usable 'spec'"),
        (
            '{"schema": 1, "spec": {}, "made_from": {"packages": {}}, "code": {}, "artifacts": {}, "choice": {}}',
            "spec.lock has no usable 'choice'",
        ),
    ],
)
def test_a_lock_that_cannot_be_used_exits_2(locked, content, message):
    folder, run = locked
    (folder / "spec.lock").unlink()
    if content is not None:
        (folder / "spec.lock").write_text(content)
    done = run()
    assert done.returncode == 2 and message in done.stderr


def test_steps_are_locked_too_and_side_by_side(tmp_path):
    (tmp_path / "step.py").write_text("class TritonPythonModel:\n    pass\n")
    for name in ("s1", "s2"):
        (tmp_path / f"{name}.yaml").write_text(STEP.replace("NAME", name))
    assert run_compile("build", tmp_path, "-r", tmp_path / "repo", "--lock", "-j", 2).returncode == 0
    (tmp_path / "step.py").write_text("class TritonPythonModel:\n    value = 1\n")
    done = run_compile("build", tmp_path, "-r", tmp_path / "repo", "--locked", "-j", 2)
    assert done.returncode == 1 and "made_from.files.model.py: " in done.stderr
    assert not (tmp_path / "repo" / "s1" / "2").exists()


def test_lock_and_locked_do_not_go_together(locked):
    _, run = locked
    assert run("--lock").returncode == 2
