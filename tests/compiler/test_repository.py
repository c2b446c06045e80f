from __future__ import annotations

import errno
import hashlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compiler import repository as module
from compiler.build_key import up_to_date
from compiler.errors import EnvironmentLacks, RepositoryError
from compiler.repository import Repository

CONFIG = 'name: "m"\nbackend: "onnxruntime"\nmax_batch_size: 4\n'


@pytest.fixture
def files(tmp_path: Path) -> Path:
    folder = tmp_path / "files"
    folder.mkdir()
    (folder / "model.onnx").write_bytes(b"weights")
    (folder / "model.onnx.data").write_bytes(b"more weights")
    return folder


@pytest.fixture
def store(tmp_path: Path) -> Repository:
    return Repository(tmp_path / "repo")


def tree(root: Path) -> dict[str, bytes]:
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def test_versions_count_up_and_older_ones_stay(store, files):
    first = store.publish("m", CONFIG, files, {"build_key": "1"})
    (files / "model.onnx").write_bytes(b"new weights")
    second = store.publish("m", CONFIG.replace("4", "8"), files, {"build_key": "2"})
    assert (first.version, second.version) == (1, 2)
    assert store.versions("m") == [1, 2]
    assert (store.path / "m" / "1" / "model.onnx").read_bytes() == b"weights"
    assert (store.path / "m" / "2" / "model.onnx").read_bytes() == b"new weights"
    assert "8" in (store.path / "m" / "config.pbtxt").read_text()
    assert store.latest("m").manifest["build_key"] == "2"


def test_the_manifest_holds_the_hash_of_every_file(store, files):
    published = store.publish("m", CONFIG, files, {})
    manifest = json.loads((published.folder / "manifest.json").read_text())
    digest = hashlib.sha256(b"weights").hexdigest()
    assert manifest["files"]["model.onnx"] == {"bytes": 7, "sha256": digest}
    assert set(manifest["files"]) == {"model.onnx", "model.onnx.data"}
    assert store.damage(published) == []


def test_e08_a_missing_data_file_is_found_by_the_manifest(store, files):
    published = store.publish("m", CONFIG, files, {})
    (published.folder / "model.onnx.data").unlink()
    assert store.damage(published) == ["model.onnx.data is missing"]


def test_e07_a_file_cut_or_changed_is_found_by_the_manifest(store, files):
    published = store.publish("m", CONFIG, files, {})
    (published.folder / "model.onnx").write_bytes(b"WEIGHTS")
    assert store.damage(published) == ["model.onnx is not the file that was published (sha256 differs)"]
    (published.folder / "model.onnx").write_bytes(b"wei")
    assert store.damage(published) == ["model.onnx is not the file that was published (sha256 differs)"]


def test_a_manifest_that_names_a_file_elsewhere_is_not_followed(store, files, tmp_path):
    published = store.publish("m", CONFIG, files, {})
    (tmp_path / "secret").write_bytes(b"x")
    published.manifest["files"] = {"../../../secret": {"bytes": 1, "sha256": "0"}}
    assert "is not a file of the version folder" in store.damage(published)[0]


def test_e01_a_reader_sees_the_old_or_the_new_never_a_mixture(store, files):
    """A reader polls while 30 versions are published, each with a config that names its version."""
    store.publish("m", "1", files, {})
    stop, seen = multiprocessing.Event(), multiprocessing.Queue()
    reader = multiprocessing.Process(target=_poll, args=(store.path / "m", stop, seen))
    reader.start()
    try:
        for version in range(2, 32):
            store.publish("m", str(version), files, {})
    finally:
        stop.set()
        polls, faults = seen.get(timeout=30)
        reader.join(30)
    assert faults == [] and polls > 30
    assert store.versions("m") == list(range(1, 32))


def _poll(folder: Path, stop, seen) -> None:
    """Opens the folder once per poll and reads all of it through that handle."""
    polls, faults = 0, []
    while not stop.is_set():
        polls += 1
        handle = os.open(folder, os.O_RDONLY)
        fault = _look(handle)
        # A folder that was exchanged meanwhile is being cleared: that poll came too late, and saw no mixture.
        if fault and os.fstat(handle).st_ino == os.stat(folder).st_ino:
            faults.append(fault)
        os.close(handle)
    seen.put((polls, faults))


def _look(handle: int) -> str:
    """Returns what is inconsistent in an open model folder, or an empty string."""
    try:
        version = _read(handle, "config.pbtxt").decode()
        newest = max((n for n in os.listdir(handle) if n.isdigit()), key=int, default="none")
        if newest != version:
            return f"config of {version} with version {newest}"
        return "" if _read(handle, f"{newest}/model.onnx") == b"weights" else f"version {newest} is half there"
    except FileNotFoundError as error:
        return str(error)


def _read(handle: int, name: str) -> bytes:
    descriptor = os.open(name, os.O_RDONLY, dir_fd=handle)
    try:
        return os.read(descriptor, 100)
    finally:
        os.close(descriptor)


def test_e09_two_publishers_of_one_model_get_two_versions(store, files):
    with multiprocessing.Pool(4) as pool:
        versions = pool.starmap(_publish, [(store, files)] * 8)
    assert sorted(versions) == list(range(1, 9))
    assert store.damage(store.latest("m")) == []
    assert [p.name for p in store.path.iterdir()] == ["m"]


def _publish(store: Repository, files: Path) -> int:
    return store.publish("m", CONFIG, files, {}).version


def test_nothing_but_models_is_ever_inside_the_repository(store, files, monkeypatch):
    """Triton takes a hidden staging folder for a model and then refuses to start."""
    inside = []
    swap = module._swap
    monkeypatch.setattr(module, "_swap", lambda a, b: (inside.append(sorted(os.listdir(store.path))), swap(a, b)))
    store.publish("m", CONFIG, files, {})
    store.publish("m", CONFIG, files, {})
    assert inside == [[], ["m"]]


def test_a_failure_at_the_last_step_leaves_the_repository_as_it_was(store, files, monkeypatch):
    store.publish("m", CONFIG, files, {})
    before = tree(store.path)

    def fail(staged, final):
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(module, "_swap", fail)
    with pytest.raises(OSError):
        store.publish("m", "other", files, {})
    assert tree(store.path) == before
    assert [p.name for p in store.path.parent.iterdir() if "staging" in p.name] == []


@pytest.mark.parametrize("step", ["copyfile", "write_text", "_sync_tree", "_swap"])
def test_a_publish_killed_at_any_step_leaves_the_repository_as_it_was(store, files, step):
    store.publish("m", CONFIG, files, {})
    before = tree(store.path)
    code = f"""
import os, shutil, signal, sys
from pathlib import Path
import compiler.repository as module
def die(*args, **kwargs): os.kill(os.getpid(), signal.SIGKILL)
target = {{"copyfile": shutil, "write_text": Path}}.get({step!r}, module)
setattr(target, {step!r}, die)
module.Repository(Path({str(store.path)!r})).publish("m", "other", Path({str(files)!r}), {{}})
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert tree(store.path) == before
    # The next one works, and clears what the killed one left beside the repository.
    assert store.publish("m", CONFIG, files, {}).version == 2
    assert [p.name for p in store.path.parent.iterdir() if "staging" in p.name] == []


def test_a_model_folder_that_somebody_wrote_by_hand_is_not_replaced(store):
    folder = store.path / "m"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text("mine")
    with pytest.raises(RepositoryError, match="was not made by `compile build`"):
        store.check_publishable("m")


def test_without_exchange_a_version_is_added_where_the_config_stays(store, files, monkeypatch):
    """Filesystems such as NFS cannot exchange two folders."""
    store.publish("m", CONFIG, files, {})

    def exchange(*args):
        module.ctypes.set_errno(errno.EINVAL)
        return -1

    class Libc:
        renameat2 = staticmethod(exchange)

    monkeypatch.setattr(module.ctypes, "CDLL", lambda *a, **k: Libc)
    assert store.publish("m", CONFIG, files, {}).version == 2
    assert store.versions("m") == [1, 2] and store.damage(store.latest("m")) == []
    before = tree(store.path)
    with pytest.raises(EnvironmentLacks, match="cannot exchange two folders"):
        store.publish("m", CONFIG + "\n", files, {})
    assert tree(store.path) == before


def test_folders_that_are_no_versions_are_ignored(store, files):
    store.publish("m", CONFIG, files, {})
    for name in ("01", "two", "1.5", "-3"):
        (store.path / "m" / name).mkdir()
    assert store.versions("m") == [1]


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    manifest=st.one_of(
        st.binary(max_size=200),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text(max_size=8),
            lambda inner: (
                st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["files", "code", "schema", "x"]), inner)
            ),
            max_leaves=8,
        ).map(lambda value: json.dumps({"schema": 1, **value} if isinstance(value, dict) else value).encode()),
    )
)
def test_a_manifest_that_is_garbage_is_damage_and_never_a_crash(store, files, manifest):
    version = max(store.versions("fuzz"), default=0)
    if not version:
        version = store.publish("fuzz", CONFIG, files, {}).version
    (store.path / "fuzz" / str(version) / "manifest.json").write_bytes(manifest)
    found = store.latest("fuzz")
    assert found is None or isinstance(store.damage(found), list)
    assert up_to_date(store, "fuzz", {}, files) is None


def test_a_deeply_nested_manifest_is_no_manifest(store, files):
    published = store.publish("m", CONFIG, files, {})
    (published.folder / "manifest.json").write_text("[" * 100_000)
    assert store.latest("m") is None
