"""Built graphs on disk."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from backends.llm.engine.outputs import BlockId, RequestId, ScheduledRequest, SchedulerOutput
from backends.llm.loaders.base import LoadedModel, Weight
from backends.llm.runners.cpu_options import CpuOptions
from backends.llm.runners.kept import carry
from backends.llm.runners.openvino import OpenVinoRunner
from backends.llm.runners.openvino.graph_cache import temporary_graph
from compiler.errors import ModelRefused
from tests.backends.llm.runners.tiny_models import build

IDS = list(range(20))


class _Unreadable(dict[str, Weight]):
    def __getitem__(self, name: str) -> Weight:
        raise AssertionError(f"{name} was read")


def _logits(model: LoadedModel, options: CpuOptions) -> np.ndarray:
    runner = OpenVinoRunner(model, options)
    part = ScheduledRequest(RequestId("a"), IDS, 0, [BlockId(0)], len(IDS))
    return runner.execute(SchedulerOutput((part,))).logits.copy()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "graphs"


@pytest.fixture
def options(folder: Path) -> CpuOptions:
    return CpuOptions(exact=True, kv_cache_bytes=1 << 22, cache_dir=folder)


def test_the_second_load_reads_no_weights_and_answers_alike(folder: Path, options: CpuOptions) -> None:
    model = build("gemma3")[1]
    first = _logits(model, options)
    np.testing.assert_array_equal(first, _logits(model, replace(options, cache_dir=None)))
    unread: Mapping[str, Weight] = _Unreadable(dict.fromkeys(model.weights))  # type: ignore[arg-type]
    np.testing.assert_array_equal(first, _logits(replace(model, weights=unread), options))
    assert len(list(folder.iterdir())) == 1, "nothing half-made is left"


def test_another_file_or_form_is_another_graph(folder: Path, options: CpuOptions) -> None:
    model = build("llama")[1]
    _logits(model, options)
    _logits(replace(model, source={"model.gguf": "0" * 64}), options)
    assert len(list(folder.iterdir())) == 2
    _logits(model, replace(options, exact=False, weights="bf16"))
    assert len(list(folder.iterdir())) == 3


def test_a_damaged_graph_is_named(folder: Path, options: CpuOptions) -> None:
    model = build("llama")[1]
    _logits(model, options)
    [place] = folder.iterdir()
    (place / "decoder.bin").write_bytes(b"short")
    with pytest.raises(ModelRefused, match=rf"the graph in {place} is damaged(.|\n)*remove that folder"):
        _logits(model, options)


def _from_file(name: str) -> LoadedModel:
    return replace(build("llama")[1], source={name: "0" * 64})


@pytest.fixture
def version(folder: Path, options: CpuOptions, tmp_path: Path) -> Path:
    """A version folder that carries the graph of a tiny Llama, as `compile llm` publishes it."""
    _logits(_from_file("model.gguf"), options)
    (tmp_path / "1").mkdir()
    carry(folder, tmp_path / "1")
    return tmp_path / "1"


def test_a_version_carries_its_graph_under_whatever_name_the_file_has(version: Path, options: CpuOptions) -> None:
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
    options: CpuOptions,
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
from backends.llm.runners.cpu_options import CpuOptions
from backends.llm.runners.openvino import OpenVinoRunner

def own_bytes():
    [line] = [l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith("RssAnon")]
    return int(line.split()[1]) * 1024

def mapped_bytes():
    maps, ours = Path("/proc/self/smaps").read_text().splitlines(), False
    found = 0
    for line in maps:
        if "-" in line.split()[0] and ":" not in line.split()[0]:
            ours = "decoder.bin" in line
        elif ours and line.startswith("Rss:"):
            found += int(line.split()[1]) * 1024
    return found

before = own_bytes()
folder = Path(sys.argv[2]) if len(sys.argv) > 2 else None
options = CpuOptions(kv_cache_bytes=1 << 22, num_threads=2, cache_dir=folder)
runner = OpenVinoRunner(load_model(sys.argv[1]), options)
runner.execute(SchedulerOutput((ScheduledRequest("a", [1, 2, 3], 0, [0], 1),)))
assert any("decoder.bin" in line for line in Path("/proc/self/maps").read_text().splitlines())
print(own_bytes() - before, mapped_bytes())
"""


@pytest.mark.parametrize("kept", [False, True])
def test_weights_are_in_memory_once(smollm2: Path, tmp_path: Path, kept: bool) -> None:
    """The packed weights are the process's own; what they were packed from has left its memory."""
    weights = 134_515_008  # parameters, a byte each in "u8_rows"
    command = [sys.executable, "-c", _MEMORY, str(smollm2), *([str(tmp_path)] if kept else [])]
    for _ in range(1 + kept):
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        own, mapped = map(int, done.stdout.split())
        assert weights < own < 1.4 * weights
        assert mapped < 0.1 * weights


def test_without_room_for_a_file_the_graph_stays_in_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = build("llama")[1]
    options = CpuOptions(exact=True, kv_cache_bytes=1 << 22)
    wanted = _logits(model, options)
    full = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: full)
    assert temporary_graph(model, "stored")[1] is None
    np.testing.assert_array_equal(wanted, _logits(model, options))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    assert temporary_graph(model, "stored")[1] is None
    np.testing.assert_array_equal(wanted, _logits(model, options))


def test_a_temporary_file_leaves_no_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    _, folder = temporary_graph(build("llama")[1], "stored")
    assert folder is not None and folder.parent == tmp_path and not list(tmp_path.iterdir())
