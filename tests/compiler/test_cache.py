"""What builds keep between them: hits, misses, damage, races, pruning; and builds that use it, as a user runs them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest

from compiler.cache import ENTRY_FILE, Cache
from tests.compiler.conftest import SPEC
from tests.serving import environment, run_compile

KEY, OTHER = "a" * 64, "b" * 64


def _files(folder, name="graph", content=b"12345"):
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(content)
    return folder


def _any(facts):
    return True


def _no_note(line):
    raise AssertionError(line)


def test_what_was_stored_is_found_by_its_key_and_its_facts(tmp_path):
    cache = Cache(tmp_path / "cache")
    assert cache.find("model", KEY, _any, _no_note) is None
    assert cache.store("model", KEY, "one", "m", _files(tmp_path / "files"), {"code": 1}) == ""
    assert cache.store("model", KEY, "two", "m", _files(tmp_path / "files", content=b"67"), {"code": 2}) == ""
    found = cache.find("model", KEY, lambda facts: facts["code"] == 1, _no_note)
    assert found is not None and (found.folder / "graph").read_bytes() == b"12345" and found.num_bytes == 5
    assert cache.find("model", KEY, lambda facts: facts["code"] == 3, _no_note) is None
    assert cache.find("model", OTHER, _any, _no_note) is None
    assert cache.find("graph", KEY, _any, _no_note) is None


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("graph", b"12346"),
        ("graph", b"1"),
        ("graph", None),
        (ENTRY_FILE, b""),
        (ENTRY_FILE, b"[]"),
        (ENTRY_FILE, b'{"kind": "model"}'),
        (ENTRY_FILE, b"\xff\xfe"),
    ],
)
def test_a_damaged_entry_is_told_removed_and_made_again(tmp_path, file, content):
    cache, notes = Cache(tmp_path / "cache"), []
    cache.store("model", KEY, "one", "m", _files(tmp_path / "files"), {})
    [entry] = cache.entries()
    if content is None:
        (entry.folder / file).unlink()
    else:
        (entry.folder / file).write_bytes(content)
    assert cache.find("model", KEY, _any, notes.append) is None
    assert len(notes) == 1 and notes[0].startswith("note: a damaged cache entry was ignored and is made again: ")
    assert not entry.folder.exists()
    cache.store("model", KEY, "one", "m", tmp_path / "files", {})
    assert cache.find("model", KEY, _any, _no_note) is not None


def test_facts_that_were_edited_are_damage(tmp_path):
    cache, notes = Cache(tmp_path / "cache"), []
    cache.store("model", KEY, "one", "m", _files(tmp_path / "files"), {"trusted": ["x.pt2"]})
    path = cache.entries()[0].folder / ENTRY_FILE
    path.write_text(path.read_text().replace('["x.pt2"]', "[]"))
    assert cache.find("model", KEY, _any, notes.append) is None and "sha256 differs" in notes[0]


def test_what_was_used_longest_ago_goes_first_and_the_newest_stays(tmp_path):
    cache = Cache(tmp_path / "cache", max_bytes=3000)
    for age, name in ((30, "old"), (20, "used"), (10, "new")):
        cache.store("model", KEY, name, name, _files(tmp_path / name, content=bytes(700)), {"name": name})
        entry = next(e for e in cache.entries() if e.model == name)
        os.utime(entry.folder / ENTRY_FILE, (1e9 - age, 1e9 - age))
    cache.find("model", KEY, lambda facts: facts["name"] == "old", _no_note)  # now the one used last
    cache.store("model", KEY, "last", "last", _files(tmp_path / "last", content=bytes(700)), {"name": "last"})
    assert {e.model for e in cache.entries()} == {"old", "new", "last"}
    assert "are more than the cache may hold" in cache.store(
        "model", KEY, "huge", "huge", _files(tmp_path / "huge", content=bytes(3001)), {}
    )


def test_two_builds_may_store_the_same_entry(tmp_path):
    code = """
import sys
from pathlib import Path
from compiler.cache import Cache
for _ in range(50):
    problem = Cache(Path(sys.argv[1])).store("model", "a" * 64, "one", "m", Path(sys.argv[2]), {})
    assert not problem, problem
"""
    files = _files(tmp_path / "files", content=bytes(100_000))
    command = [sys.executable, "-c", code, str(tmp_path / "cache"), str(files)]
    racers = [subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True) for _ in range(3)]
    for racer in racers:
        assert racer.wait() == 0, racer.stderr.read()
    cache = Cache(tmp_path / "cache")
    assert len(cache.entries()) == 1 and cache.find("model", KEY, _any, _no_note) is not None
    assert list((tmp_path / "cache" / "v1" / "tmp").iterdir()) == []


def test_clear_removes_entries_and_nothing_else(tmp_path):
    cache = Cache(tmp_path)
    cache.store("model", KEY, "one", "m", _files(tmp_path / "files"), {})
    (tmp_path / "v1" / "mine.txt").write_text("mine")
    (tmp_path / "v1" / "model" / "mine-too.txt").write_text("mine")
    assert cache.clear()[0] == 1
    left = {p.name for p in tmp_path.rglob("*") if p.is_file()}
    assert left == {"graph", "mine.txt", "mine-too.txt"}


MODEL = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 3)
    def forward(self, x):
        return self.layer(x)
build = Model
"""
# Runs the command in this process and tells whether torch was imported.
WATCHED = """
import sys
from compiler.cli import main
try:
    main(sys.argv[1:])
finally:
    print("torch was imported" if "torch" in sys.modules else "no torch", file=sys.stderr)
"""


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    """A folder with a model without a seed that was built once: spec, repository and cache."""
    folder = tmp_path_factory.mktemp("template")
    (folder / "cache_model.py").write_text("import torch\nfrom torch import nn\n" + MODEL)
    (folder / "spec.yaml").write_text(SPEC.replace("FACTORY", "cache_model:build").lstrip())
    cache = str(folder / "cache")
    first = run_compile("build", folder / "spec.yaml", "-r", folder / "repo", MODELKILN_CACHE_DIR=cache)
    assert first.returncode == 0 and "from the cache" not in first.stderr, first.stderr
    return folder


@pytest.fixture
def cached(template, tmp_path):
    """A copy of the template: (spec, repository, cache folder, run)."""
    shutil.copytree(template, tmp_path, dirs_exist_ok=True)
    spec, repository, cache = (tmp_path / name for name in ("spec.yaml", "repo", "cache"))

    def run(*extra):
        return run_compile("build", spec, "-r", repository, *extra, MODELKILN_CACHE_DIR=str(cache))

    return spec, repository, cache, run


@pytest.mark.parametrize(
    "addition",
    [
        "precision: int8_dynamic\n",
        "target: openvino\n",
        "tolerance: {cosine: 0.9}\n",
        "serving: {instances: 2, threads: 1}\n",
        "require_fusion: {}\n",
    ],
)
def test_precision_target_tolerance_and_serving_neither_load_nor_export_again(cached, addition):
    spec, repository, cache, _ = cached
    spec.write_text(spec.read_text() + addition)
    command = [sys.executable, "-c", WATCHED, "build", str(spec), "-r", str(repository), "--json"]
    env = environment(MODELKILN_CACHE_DIR=str(cache))
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stderr.endswith("no torch\n") and done.stderr.count("  from the cache\n") == 3
    [model] = json.loads(done.stdout)["models"]
    assert [s["name"] for s in model["stages"] if s["from_cache"]] == [
        "load the model",
        "run the reference",
        "export to ONNX",
    ]
    assert model["version"] == 2 and model["manifest"]["parameters"] == 51


def test_a_converted_graph_is_used_again_where_only_the_serving_changes(cached):
    spec, repository, _, run = cached
    first = run("--precision", "int8_dynamic")
    assert "the graph is from the cache" not in first.stderr
    spec.write_text(spec.read_text() + "serving: {instances: 2}\n")
    again = run("--precision", "int8_dynamic")
    assert "    onnxruntime int8_dynamic: the graph is from the cache\n" in again.stderr
    two, three = ((repository / "small" / version) for version in ("2", "3"))
    assert (two / "model.onnx").read_bytes() == (three / "model.onnx").read_bytes()
    manifests = [json.loads((folder / "manifest.json").read_text()) for folder in (two, three)]
    assert manifests[0]["passes"] == manifests[1]["passes"] and manifests[0]["graph"] == manifests[1]["graph"]
    # What conversions are judged by is part of the key.
    spec.write_text(spec.read_text() + "tolerance: {cosine: 0.9}\n")
    assert "the graph is from the cache" not in run("--precision", "int8_dynamic").stderr


CALIBRATION = """
import numpy as np
def samples():
    ends = np.array([[-4.0] * 16, [4.0] * 16])
    return [{"x": x.astype(np.float32)} for x in (ends, np.random.default_rng(0).uniform(-4, 4, (8, 16)))]
"""


def test_a_calibration_function_behind_a_kept_graph_still_counts(cached):
    spec, _, _, run = cached
    (spec.parent / "cache_samples.py").write_text(CALIBRATION)
    spec.write_text(
        spec.read_text() + "precision: int8\ncalibration: cache_samples:samples\ntolerance: {cosine: 0.5}\n"
    )
    assert run().returncode == 0
    spec.write_text(spec.read_text() + "serving: {instances: 2}\n")
    assert "int8: the graph is from the cache" in run().stderr
    assert "up to date" in run().stdout
    _append(spec.parent / "cache_samples.py", "VALUE = 1\n")
    done = run()
    assert done.stdout.startswith("small version 4: built") and "int8: the graph is from the cache" not in done.stderr


@pytest.mark.parametrize(
    "change",
    [
        lambda spec: spec.write_text(spec.read_text().replace("max: 8", "max: 9")),
        lambda spec: spec.write_text(spec.read_text() + "opset: 18\n"),
        lambda spec: _append(spec.parent / "cache_model.py", "\nVALUE = 1\n"),
    ],
    ids=["dims", "opset", "code"],
)
def test_what_the_graph_depends_on_is_made_again(cached, change):
    spec, _, _, run = cached
    change(spec)
    done = run()
    assert done.returncode == 0 and "from the cache" not in done.stderr


def test_a_forced_build_from_the_cache_gives_the_same_bytes_as_the_first(cached):
    _, repository, _, run = cached
    done = run("--force")
    assert done.stderr.count("  from the cache\n") == 3
    for name in ("model.onnx", "reference.npz"):
        assert (repository / "small" / "1" / name).read_bytes() == (repository / "small" / "2" / name).read_bytes()


def test_no_cache_neither_reads_nor_writes(cached):
    _, _, cache, run = cached
    before = sorted(p.name for p in cache.rglob("*"))
    done = run("--force", "--no-cache")
    assert done.returncode == 0 and "from the cache" not in done.stderr
    assert "load the model" in done.stderr and "nodes" in done.stderr  # what the export says when it runs
    assert sorted(p.name for p in cache.rglob("*")) == before


def test_a_damaged_entry_costs_a_note_and_another_export(cached):
    _, _, cache, run = cached
    for graph in cache.rglob("model.onnx"):
        content = bytearray(graph.read_bytes())
        content[len(content) // 2] ^= 1
        graph.write_bytes(content)
    done = run("--force")
    assert done.returncode == 0 and "note: a damaged cache entry was ignored" in done.stderr
    assert "run the reference" in done.stderr and done.stderr.count("  from the cache\n") == 0
    assert run("--force").stderr.count("  from the cache\n") == 3


def test_a_cache_that_cannot_be_written_costs_a_note(project, tmp_path):
    spec = project(MODEL)
    (tmp_path / "a_file").write_text("")
    done = run_compile("build", spec, "-r", tmp_path / "repo", MODELKILN_CACHE_DIR=str(tmp_path / "a_file"))
    assert done.returncode == 0 and "note: not kept in the cache" in done.stderr


def test_a_read_only_cache_serves(cached):
    _, _, cache, run = cached
    for path in [*cache.rglob("*"), cache]:
        path.chmod(0o500 if path.is_dir() else 0o400)
    try:
        done = run("--force")
        assert done.returncode == 0 and done.stderr.count("  from the cache\n") == 3
    finally:
        for path in [cache, *cache.rglob("*")]:
            path.chmod(0o700)


def test_what_was_made_with_trust_is_not_served_without_it(tmp_path, project):
    import torch

    linear = torch.nn.Linear(16, 3)
    program = torch.export.export(
        linear, (torch.zeros(3, 16),), dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=8)},)
    )
    torch.export.save(program, tmp_path / "m.pt2")
    spec = project("")
    text = spec.read_text()
    source = text[text.index("source:") : text.index("dims:")]
    spec.write_text(text.replace(source, "source: {exported_program: m.pt2}\n").replace("name: x", "name: input"))
    cache = str(tmp_path / "cache")
    trusted = run_compile("build", spec, "-r", tmp_path / "repo", "--trust-pickle", MODELKILN_CACHE_DIR=cache)
    assert trusted.returncode == 0, trusted.stderr
    refused = run_compile("build", spec, "-r", tmp_path / "repo", "--force", MODELKILN_CACHE_DIR=cache)
    assert refused.returncode == 1 and "--trust-pickle" in refused.stderr
    again = run_compile("build", spec, "-r", tmp_path / "repo", "--force", "--trust-pickle", MODELKILN_CACHE_DIR=cache)
    assert (
        again.stderr.count("  from the cache\n") == 3
        and "warning: m.pt2 was opened with --trust-pickle" in again.stderr
    )


def test_show_and_clear(cached):
    _, _, cache, run = cached
    shown = run_compile("cache", "show", MODELKILN_CACHE_DIR=str(cache))
    assert shown.returncode == 0 and shown.stdout.startswith("small ") and f"{cache}: 2 entries" in shown.stdout
    entries = json.loads(run_compile("cache", "show", "--json", MODELKILN_CACHE_DIR=str(cache)).stdout)["entries"]
    assert sorted((e["kind"], e["model"]) for e in entries) == [("graph", "small"), ("model", "small")]
    cleared = run_compile("cache", "clear", MODELKILN_CACHE_DIR=str(cache))
    assert cleared.stdout.startswith(f"{cache}: 2 entries removed, ")
    assert "from the cache" not in run("--force").stderr


def test_a_wrong_size_is_refused_with_what_is_allowed():
    done = run_compile("cache", "show", MODELKILN_CACHE_SIZE="lots")
    assert done.returncode == 2
    assert "MODELKILN_CACHE_SIZE is 'lots'; allowed: a size with its unit, such as 512MiB or 10GiB" in done.stderr


def test_weights_beside_the_graph_are_read_whole(tmp_path, monkeypatch):
    """Above the protobuf limit (lowered here) the graph in the cache has a data file, which may be pruned later."""
    import onnx_ir

    from compiler.source_graph import read_graph
    from compiler.targets.onnxruntime import write_onnx

    weight = onnx_ir.tensor(np.arange(1000, dtype=np.float32), name="w")
    value = onnx_ir.Value(name="w", const_value=weight, type=onnx_ir.TensorType(onnx_ir.DataType.FLOAT))
    graph = onnx_ir.Graph([], [], nodes=[], initializers=[value], opset_imports={"": 20}, name="g")
    write_onnx(onnx_ir.Model(graph, ir_version=10), tmp_path, threshold_bytes=100)
    assert (tmp_path / "model.onnx.data").exists()
    model = read_graph(tmp_path)
    (tmp_path / "model.onnx.data").unlink()
    assert model.graph.initializers["w"].const_value.numpy().tolist() == list(range(1000))


def _append(path, text):
    path.write_text(path.read_text() + text)
