"""i06: a model's name with path parts is refused wherever one enters, and nothing outside the repository is touched."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from compiler.cli import main
from compiler.errors import SpecError, UsageError
from compiler.model_control import ModelControl
from compiler.python_step import python_step_from_node
from compiler.repository import Repository
from compiler.spec import model_spec_from_file
from compiler.yaml_reader import read_yaml
from ensembles.graph import ensemble_from_node

NAMES = ["../../x", "a/b", "", ".", "..", "a\nb", "a\\b", "/abs", "a\0b", "é", "a" * 129]
REFUSAL = r"name (is .*; allowed: 1 to 128 of|must be a non-empty string, not '')"
MODEL = """
name: {name}
source: {{factory: "m:build"}}
inputs: [{{name: x, dtype: float32, shape: [4]}}]
outputs: [{{name: y}}]
"""
STEP = """
name: {name}
source: {{python: step.py}}
inputs: [{{name: x, dtype: float32, shape: [4]}}]
outputs: [{{name: y, dtype: float32, shape: [4]}}]
"""
ENSEMBLE = """
name: {name}
inputs: [x]
outputs: [y]
steps: [{{model: {step}, inputs: {{x: x}}, outputs: {{y: y}}}}]
"""


def _tree(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


def _quoted(name: str) -> str:
    return '"' + name.replace("\\", "\\\\").replace("\n", "\\n").replace("\0", "\\0") + '"'


@pytest.mark.parametrize("name", NAMES)
def test_i06_in_every_kind_of_spec(name, tmp_path):
    spec = tmp_path / "spec.yaml"
    (tmp_path / "step.py").write_text("class TritonPythonModel: ...\n")
    spec.write_text(MODEL.format(name=_quoted(name)))
    with pytest.raises(SpecError, match=REFUSAL):
        model_spec_from_file(spec)
    spec.write_text(STEP.format(name=_quoted(name)))
    with pytest.raises(SpecError, match=REFUSAL):
        python_step_from_node(read_yaml(spec), spec)
    for names in ({"name": _quoted(name), "step": "m"}, {"name": "pipe", "step": _quoted(name)}):
        spec.write_text(ENSEMBLE.format(**names))
        with pytest.raises(SpecError, match=REFUSAL):
            ensemble_from_node(read_yaml(spec), spec)


@pytest.mark.parametrize("name", NAMES)
def test_i06_in_the_repository_and_before_the_server(name, tmp_path):
    """The last gates, whatever comes before them."""
    files = tmp_path / "files"
    files.mkdir()
    store = Repository(tmp_path / "deep" / "below" / "repository")
    store.publish("good", "", files, {})
    before = _tree(tmp_path)
    for call in (
        lambda: store.publish(name, "", files, {}),
        lambda: store.check_publishable(name),
        lambda: store.find(name),
        lambda: store.find(f"good:{name or '../1'}"),
        lambda: ModelControl("127.0.0.1:1", "key", 1).load(name),
        lambda: ModelControl("127.0.0.1:1", "key", 1).unload(name),
    ):
        with pytest.raises(UsageError) as raised:
            call()
        assert "\n" not in raised.value.message and "\0" not in raised.value.message
    assert _tree(tmp_path) == before


@pytest.mark.parametrize("name", [name for name in NAMES if "\0" not in name])  # no argument holds a zero byte
def test_i06_in_the_commands(name, tmp_path):
    """`compile llm` published to any folder once; the file that it names is not even looked for."""
    repository = tmp_path / "deep" / "below" / "repository"
    repository.mkdir(parents=True)
    before = _tree(tmp_path)
    for words in (["llm", "no.gguf", "--name", name], ["verify", name], ["explain", name]):
        done = CliRunner().invoke(main, [*words, "-r", str(repository)])
        assert done.exit_code == 2 and "no.gguf" not in done.output, done.output
    assert _tree(tmp_path) == before


def test_i06_a_repository_with_such_names_is_not_served(tmp_path):
    """A step's name is a path for the bundled server, so one that leaves the repository is refused before it starts."""
    outside, pipe = tmp_path / "outside", tmp_path / "repository" / "pipe"
    for folder in (outside / "1", pipe / "1", tmp_path / "repository" / "a\nb" / "1"):
        folder.mkdir(parents=True)
    (outside / "config.pbtxt").write_text('backend: "python"')
    (pipe / "config.pbtxt").write_text(
        'platform: "ensemble" ensemble_scheduling { step { model_name: "../outside" model_version: -1 } }'
    )
    done = CliRunner().invoke(main, ["check", str(tmp_path / "repository")])
    assert done.exit_code == 1
    assert "step '../outside' is not in the repository" in done.output
    assert r"the folder's name is not one that Triton can load: 'a\nb'" in done.output
