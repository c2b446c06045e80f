"""Which versions are served: the newest, or those that `compile pin` names; proved again, and switched in one step."""

from __future__ import annotations

import itertools
import json
import shutil
import threading
from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner
from onnx import numpy_helper

from compiler.check import check_repository
from compiler.cli import main
from compiler.engine_host import EngineHost
from compiler.errors import RepositoryError, UsageError
from compiler.files import file_sha256
from compiler.pins import pin
from compiler.pipeline import compile_model
from compiler.repository import Repository
from compiler.spec import model_spec_from_file
from compiler.triton_config import config_from_text
from tests.compiler.onnx_models import BIAS, SPEC, WEIGHT, model, write


def build(folder: Path, repository: Path, step: float, spec: str = SPEC) -> None:
    """Publishes a version of the linear model whose answers are `step` higher."""
    weights = [numpy_helper.from_array(WEIGHT, "w"), numpy_helper.from_array(BIAS + np.float32(step), "b")]
    compile_model(model_spec_from_file(write(folder, model(initializers=weights), spec)), Repository(repository))


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three versions; the third with another config."""
    folder = tmp_path_factory.mktemp("pins")
    build(folder, folder / "repo", 1)
    build(folder, folder / "repo", 2)
    build(folder, folder / "repo", 3, SPEC + "serving: {max_queue_delay_us: 100}\n")
    return folder / "repo"


@pytest.fixture
def store(three: Path, tmp_path: Path) -> Repository:
    shutil.copytree(three, tmp_path / "repo")
    return Repository(tmp_path / "repo")


def _config(store: Repository) -> str:
    return (store.path / "linear" / "config.pbtxt").read_text()


def _findings(store: Repository) -> list[str]:
    return [finding.message for finding in check_repository(store, host=EngineHost())]


def test_e05_the_pin_is_a_specific_policy_in_the_config_of_that_version(store):
    newest = _config(store)
    pin(store, "linear", [2])
    assert list(config_from_text(_config(store), "").version_policy.specific.versions) == [2]
    assert "max_queue_delay_microseconds: 100" in newest and "max_queue_delay_microseconds" not in _config(store)
    assert store.pinned("linear") == [2] and store.versions("linear") == [1, 2, 3] and _findings(store) == []
    pin(store, "linear", [2, 1, 2])
    assert store.pinned("linear") == [1, 2] and _findings(store) == []
    pin(store, "linear", [])
    assert _config(store) == newest and store.pinned("linear") == []


def test_a_build_does_not_take_the_pin_off(store, tmp_path):
    """It is published and told; what is served stays, and so does the config that it is served with."""
    pin(store, "linear", [1])
    pinned = _config(store)
    (tmp_path / "spec.yaml").write_text(SPEC)
    (tmp_path / "model.onnx").write_bytes(model().SerializeToString())
    words = ["build", str(tmp_path / "spec.yaml"), "-r", str(store.path)]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    assert "linear version 4: built" in done.stdout
    assert done.stdout.endswith("; not served: pinned to 1 (see `compile pin`)\n")
    assert _config(store) == pinned and store.versions("linear") == [1, 2, 3, 4]
    again = json.loads(CliRunner().invoke(main, [*words, "--json"]).stdout)["models"][0]
    assert (again["built"], again["version"], again["pinned"]) == (False, 4, [1])
    pin(store, "linear", [4])
    assert "pinned to" not in CliRunner().invoke(main, words).stdout


def test_versions_that_need_different_configs_are_not_served_together(store):
    before = _config(store)
    with pytest.raises(RepositoryError, match="the versions 1 and 3 have different config") as raised:
        pin(store, "linear", [3, 1])
    assert "max_queue_delay_microseconds: 100" in raised.value.message
    assert _config(store) == before


@pytest.mark.parametrize("versions", [[4], [1, 9]])
def test_a_version_that_is_not_there_is_not_pinned(store, versions):
    with pytest.raises(UsageError, match=f"linear has no version '{versions[-1]}'; it has: 1, 2, 3"):
        pin(store, "linear", versions)
    assert store.pinned("linear") == []


def test_what_does_not_answer_as_it_was_proved_is_not_pinned(store):
    """Damage is seen by the hash; where the hash was changed with the weights, by the answers."""
    path = store.path / "linear" / "2" / "model.onnx"
    proto = onnx.load(str(path))
    proto.graph.initializer[0].CopyFrom(numpy_helper.from_array(WEIGHT * 1.01, proto.graph.initializer[0].name))
    path.write_bytes(proto.SerializeToString())
    with pytest.raises(RepositoryError, match="sha256 differs"):
        pin(store, "linear", [2])
    manifest = json.loads((path.parent / "manifest.json").read_text())
    manifest["files"]["model.onnx"] = {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
    (path.parent / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(RepositoryError, match=r"version 2 is not what was published: .*output 'y'"):
        pin(store, "linear", [2])
    assert store.pinned("linear") == []


def test_a_version_that_does_not_carry_its_config_is_named(store):
    path = store.path / "linear" / "1" / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["config"]
    path.write_text(json.dumps(manifest))
    with pytest.raises(RepositoryError, match=r"linear version 1 does not carry its config\.pbtxt"):
        pin(store, "linear", [1])


def test_who_reads_while_it_is_switched_sees_one_or_the_other(store):
    newest = _config(store)
    pin(store, "linear", [1])
    pinned = _config(store)
    seen: set[str] = set()
    stop = threading.Event()

    def read() -> None:
        while not stop.is_set():
            seen.add(_config(store))

    reader = threading.Thread(target=read)
    reader.start()
    for text in itertools.islice(itertools.cycle([newest, pinned]), 200):
        store.replace_config("linear", text)
    stop.set()
    reader.join()
    assert seen == {newest, pinned}
    assert sorted(p.name for p in (store.path / "linear").iterdir()) == ["1", "2", "3", "config.pbtxt"]


def test_the_linter_looks_at_the_versions_that_are_served(store):
    (store.path / "linear" / "1" / "model.onnx").unlink()
    assert _findings(store) == []
    path = store.path / "linear" / "config.pbtxt"
    text = path.read_text()
    path.write_text(text + "version_policy { specific { versions: [1, 2, 7] } }\n")
    assert _findings(store) == [
        "version 1 has no model.onnx",
        "version 1: model.onnx is missing",
        "version_policy asks for version 7, which is not there; there are: 1, 2, 3",
    ]
    path.write_text(text + "version_policy { latest { num_versions: 2 } }\n")
    assert _findings(store) == []
    path.write_text(text + "version_policy { all {} }\n")
    assert _findings(store) == ["version 1 has no model.onnx", "version 1: model.onnx is missing"]


def test_the_command(store):
    run = CliRunner().invoke
    done = run(main, ["pin", "linear", "1", "2", "-r", str(store.path)])
    assert (done.exit_code, done.stdout) == (0, "linear: a server that starts now serves versions 1, 2\n")
    done = run(main, ["pin", "linear", "--newest", "-r", str(store.path), "--json"])
    assert json.loads(done.stdout) == {"model": "linear", "served": [3], "pinned": False}
    for words in (["linear"], ["linear", "1", "--newest"], ["linear", "0"], ["liner", "1"], ["linear", "x"]):
        assert run(main, ["pin", *words, "-r", str(store.path)]).exit_code == 2
