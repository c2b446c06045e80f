from __future__ import annotations

import json
from pathlib import Path

import pytest

from compiler.errors import EnvironmentLacks, SpecError
from compiler.python_step import publish_step, python_step_from_node
from compiler.repository import Repository
from compiler.yaml_reader import read_yaml

SPEC = """\
name: upper
source:
  python: upper.py
  files: {words.txt: data/words.txt}
parameters: {limit: 3, mode: fast}
dims:
  batch: {max: 4}
inputs: [{name: text, dtype: string, shape: [batch, 1]}]
outputs: [{name: length, dtype: int64, shape: [batch, 1]}]
"""
CODE = "raise RuntimeError('this code must not run here')\nclass TritonPythonModel:\n    pass\n"


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "words.txt").write_text("a b c")
    (tmp_path / "upper.py").write_text(CODE)
    (tmp_path / "upper.yaml").write_text(SPEC)
    return tmp_path / "upper.yaml"


def _publish(path: Path):
    return publish_step(python_step_from_node(read_yaml(path), path), Repository(path.parent / "repo"))


def test_a_step_is_published_with_its_files_and_its_code_is_not_run(spec):
    result = _publish(spec)
    folder = result.published.folder
    assert sorted(p.name for p in folder.iterdir()) == ["manifest.json", "model.py", "words.txt"]
    assert (folder / "model.py").read_text() == CODE
    config = (folder.parent / "config.pbtxt").read_text()
    assert 'backend: "python"' in config and 'string_value: "3"' in config and "TYPE_STRING" in config
    assert str(spec.parent) not in json.dumps(result.published.manifest)
    assert not _publish(spec).built


@pytest.mark.parametrize("change", ["upper.py", "data/words.txt", "upper.yaml"])
def test_each_file_that_changes_makes_a_new_version(spec, change):
    _publish(spec)
    path = spec.parent / change
    path.write_text(path.read_text().replace("limit: 3", "limit: 4") + "\n# more\n" * (change != "upper.yaml"))
    assert _publish(spec).published.version == 2


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("upper.py", "lower.py", r":3: no such file: lower\.py"),
        ("words.txt:", "../words.txt:", r":4: source\.files: '\.\./words\.txt' is not a plain file name"),
        ("words.txt:", "model.py:", r":4: source\.files: 'model\.py' is not a plain file name, or is one"),
        ("words.txt:", ".hidden:", r":4: source\.files: '\.hidden'"),
        ("data/words.txt", "data/none.txt", r":4: no such file: data/none\.txt"),
        ("dtype: int64, ", "", r":9: output 'length' of a Python step needs dtype and shape"),
        ("limit: 3", "limit: [3]", r":5: parameter 'limit' must be text or a number"),
        ("[batch, 1]}]\noutputs", "[1, batch]}]\noutputs", r"the first axis of 'text' is 1, not 'batch'"),
    ],
)
def test_wrong_specs(spec, old, new, message):
    spec.write_text(SPEC.replace(old, new, 1))
    with pytest.raises(SpecError, match=message):
        _publish(spec)
    assert not (spec.parent / "repo").exists()


def test_code_without_the_class_that_triton_looks_for(spec):
    (spec.parent / "upper.py").write_text("class Model:\n    pass\n")
    with pytest.raises(SpecError, match="has no class TritonPythonModel; its classes: Model"):
        _publish(spec)


def test_code_that_does_not_parse(spec):
    (spec.parent / "upper.py").write_text("class TritonPythonModel\n")
    with pytest.raises(SpecError, match=r"upper\.py:1: not valid Python"):
        _publish(spec)


def test_a_package_that_is_not_installed(spec):
    spec.write_text(SPEC.replace("  python: upper.py", "  python: upper.py\n  requires: [no-such-package]"))
    with pytest.raises(EnvironmentLacks, match=r":4: the step needs the package 'no-such-package'"):
        _publish(spec)
