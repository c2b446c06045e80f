"""Built graphs on disk."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from backends.llm.engine.outputs import BlockId, RequestId, ScheduledRequest, SchedulerOutput
from backends.llm.loaders.base import LoadedModel, Weight
from backends.llm.runners.openvino import OpenVinoOptions, OpenVinoRunner
from backends.llm.runners.openvino.graph_cache import carry_graphs
from compiler.errors import ModelRefused
from tests.backends.llm.runners.tiny_models import build

IDS = list(range(20))


class _Unreadable(dict[str, Weight]):
    def __getitem__(self, name: str) -> Weight:
        raise AssertionError(f"{name} was read")


def _logits(model: LoadedModel, options: OpenVinoOptions) -> np.ndarray:
    runner = OpenVinoRunner(model, options)
    part = ScheduledRequest(RequestId("a"), IDS, 0, [BlockId(0)], len(IDS))
    return runner.execute(SchedulerOutput((part,))).logits.copy()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "graphs"


@pytest.fixture
def options(folder: Path) -> OpenVinoOptions:
    return OpenVinoOptions(exact=True, kv_cache_bytes=1 << 22, cache_dir=folder)


def test_the_second_load_reads_no_weights_and_answers_alike(folder: Path, options: OpenVinoOptions) -> None:
    model = build("gemma3")[1]
    first = _logits(model, options)
    np.testing.assert_array_equal(first, _logits(model, replace(options, cache_dir=None)))
    unread: Mapping[str, Weight] = _Unreadable(dict.fromkeys(model.weights))  # type: ignore[arg-type]
    np.testing.assert_array_equal(first, _logits(replace(model, weights=unread), options))
    assert len(list(folder.iterdir())) == 1, "nothing half-made is left"


def test_another_file_or_form_is_another_graph(folder: Path, options: OpenVinoOptions) -> None:
    model = build("llama")[1]
    _logits(model, options)
    _logits(replace(model, source={"model.gguf": "0" * 64}), options)
    assert len(list(folder.iterdir())) == 2
    _logits(model, replace(options, exact=False, weights="bf16"))
    assert len(list(folder.iterdir())) == 3


def test_a_damaged_graph_is_named(folder: Path, options: OpenVinoOptions) -> None:
    model = build("llama")[1]
    _logits(model, options)
    [place] = folder.iterdir()
    (place / "decoder.bin").write_bytes(b"short")
    with pytest.raises(ModelRefused, match=rf"the graph in {place} is damaged(.|\n)*remove that folder"):
        _logits(model, options)


def _from_file(name: str) -> LoadedModel:
    return replace(build("llama")[1], source={name: "0" * 64})


@pytest.fixture
def version(folder: Path, options: OpenVinoOptions, tmp_path: Path) -> Path:
    """A version folder that carries the graph of a tiny Llama, as `compile llm` publishes it."""
    _logits(_from_file("model.gguf"), options)
    (tmp_path / "1").mkdir()
    carry_graphs(folder, tmp_path / "1")
    return tmp_path / "1"


def test_a_version_carries_its_graph_under_whatever_name_the_file_has(version: Path, options: OpenVinoOptions) -> None:
    model = _from_file("published.gguf")
    expected = _logits(model, replace(options, cache_dir=None))
    unread: Mapping[str, Weight] = _Unreadable(dict.fromkeys(model.weights))  # type: ignore[arg-type]
    published = replace(model, weights=unread)
    carried = replace(options, cache_dir=None, graph_dir=version)
    before = sorted(version.iterdir())
    np.testing.assert_array_equal(expected, _logits(published, carried))
    assert sorted(version.iterdir()) == before and len(before) == 2


@pytest.mark.parametrize("damage", ["another OpenVINO", "cut short"])
def test_a_graph_that_does_not_fit_is_built_anew_and_the_version_stays_as_it_is(
    damage: str,
    version: Path,
    options: OpenVinoOptions,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = _from_file("model.gguf")
    expected = _logits(model, replace(options, cache_dir=None))
    if damage == "cut short":
        [path] = version.glob("*.bin")
        path.write_bytes(path.read_bytes()[:100])
    else:
        monkeypatch.setattr("openvino.__version__", "1.0")
    before = {path: path.read_bytes() for path in version.iterdir()}
    np.testing.assert_array_equal(expected, _logits(model, replace(options, cache_dir=None, graph_dir=version)))
    assert {path: path.read_bytes() for path in version.iterdir()} == before
    assert "built anew" in caplog.text


_MEMORY = """
import sys
from pathlib import Path
from backends.llm.engine.outputs import ScheduledRequest, SchedulerOutput
from backends.llm.loaders import load_model
from backends.llm.runners.openvino import OpenVinoOptions, OpenVinoRunner

def own_bytes():
    [line] = [l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith("RssAnon")]
    return int(line.split()[1]) * 1024

before = own_bytes()
options = OpenVinoOptions(kv_cache_bytes=1 << 22, num_threads=2, cache_dir=Path(sys.argv[2]))
runner = OpenVinoRunner(load_model(sys.argv[1]), options)
runner.execute(SchedulerOutput((ScheduledRequest("a", [1, 2, 3], 0, [0], 1),)))
print(own_bytes() - before)
"""


def test_weights_are_in_memory_once(smollm2: Path, tmp_path: Path) -> None:
    """The packed weights are the process's own; what they were packed from is mapped from the graph's file."""
    command = [sys.executable, "-c", _MEMORY, str(smollm2), str(tmp_path)]
    taken = [int(subprocess.run(command, check=True, capture_output=True, text=True).stdout) for _ in range(2)]
    assert taken[1] < 1.9 * smollm2.stat().st_size
