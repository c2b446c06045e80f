"""Packed weights on disk: written once, mapped from then on, carried by a published version."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from backends.llm.loaders.base import LoadedModel
from backends.llm.runners.cpu_options import CpuOptions
from backends.llm.runners.kept import carry
from backends.llm.runners.numba.packed_file import open_packed
from backends.llm.runners.numba.packing import packed_bytes
from compiler.errors import ModelRefused
from tests.backends.llm.runners.tiny_models import build


class Unread(dict):
    """Weights that nobody may read."""

    def __getitem__(self, name):
        raise AssertionError(f"{name} was read")


@pytest.fixture(scope="module", params=["llama", "smollm", "qwen2", "gemma3"])
def model(request) -> LoadedModel:
    return build(request.param)[1]


def arrays(packed):
    for layer in packed.layers:
        for matrix in layer:
            yield from (matrix.codes, matrix.factors, matrix.bias)
    yield from (packed.head.codes, packed.embedding.factors, packed.norms, packed.head_norms, packed.final_norm)


def same(first, second):
    for one, other in zip(arrays(first), arrays(second), strict=True):
        np.testing.assert_array_equal(one, other)
        assert one.ctypes.data % 64 == other.ctypes.data % 64 == 0 or not one.size


def test_a_cache_is_filled_once_and_mapped(model, tmp_path):
    options = CpuOptions(cache_dir=tmp_path)
    first = open_packed(model, options)
    same(first, open_packed(model, CpuOptions()))
    unread = replace(model, weights=Unread())
    same(first, open_packed(unread, options))
    (place,) = tmp_path.iterdir()
    (path,) = place.iterdir()
    assert path.stat().st_size == packed_bytes(model.config)
    with pytest.raises(ValueError, match="read-only"):
        first.norms[:] = 0
    with pytest.raises(AssertionError, match="was read"):
        open_packed(replace(unread, source={"other": "file"}), options)
    path.write_bytes(path.read_bytes()[:-64])
    with pytest.raises(ModelRefused, match="are damaged") as caught:
        open_packed(unread, options)
    assert caught.value.hint == "remove that folder"


def test_a_version_carries_them(model, tmp_path, caplog):
    expected = open_packed(model, CpuOptions())
    open_packed(model, CpuOptions(cache_dir=tmp_path / "cache"))
    (tmp_path / "1").mkdir()
    carry(tmp_path / "cache", tmp_path / "1")
    unread = replace(model, weights=Unread())
    same(expected, open_packed(unread, CpuOptions(graph_dir=tmp_path / "1")))
    (path,) = (tmp_path / "1").iterdir()
    path.write_bytes(b"short")
    same(expected, open_packed(model, CpuOptions(graph_dir=tmp_path / "1")))
    assert "is damaged, the weights are packed anew" in caplog.text
    path.rename(tmp_path / "1" / "graph-0123.packed")
    same(expected, open_packed(model, CpuOptions(graph_dir=tmp_path / "1")))
    assert "of other code: packed anew; publish it again" in caplog.text


def test_nothing_is_left_of_an_interrupted_packing(model, tmp_path):
    with pytest.raises(AssertionError):
        open_packed(replace(model, weights=Unread()), CpuOptions(cache_dir=tmp_path))
    assert not list(tmp_path.iterdir())


_MEMORY = """
import sys
from pathlib import Path
import backends.llm.runners.numba.runner as module
from backends.llm.engine.outputs import ScheduledRequest, SchedulerOutput
from backends.llm.loaders import load_model
from backends.llm.runners.cpu_options import CpuOptions

def kilobytes(kind):
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(kind)]
    return int(line.split()[1])

before = kilobytes("RssAnon")
options = CpuOptions(kv_cache_bytes=1 << 30, num_threads=2, cache_dir=sys.argv[2] if len(sys.argv) > 2 else None)
runner = module.NumbaRunner(load_model(sys.argv[1]), options)
runner.execute(SchedulerOutput((ScheduledRequest("a", [1, 2, 3], 0, [0], 1),)))
print(1024 * (kilobytes("RssAnon") - before))
"""


@pytest.mark.parametrize("kept", [False, True])
def test_weights_are_in_memory_once(smollm2, tmp_path, kept):
    """Those that are kept are pages of a file, which all processes share; a KV cache that is not written is nowhere."""
    weights = 134_515_008  # parameters, a byte each
    command = [sys.executable, "-c", _MEMORY, str(smollm2), *([str(tmp_path)] if kept else [])]
    for _ in range(2):  # the first compiles, and packs what is kept
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    own = int(done.stdout)
    assert (0 if kept else weights) < own < (0.3 if kept else 1.3) * weights
