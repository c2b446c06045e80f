"""Before a model is READY: how long that takes by phase, its budget, and the shared memory that it will need."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from compiler.complete_configs import configs_are_complete
from compiler.repository import Repository
from compiler.shared_memory_need import shared_memory_need
from tests.serving import (
    FREE_PORTS,
    PYTHON_CONFIG,
    PYTHON_MODEL,
    run_compile,
    serve,
    write_python_model,
)

SLOW = PYTHON_MODEL.replace(
    "    def execute",
    "    def initialize(self, args):\n        import time\n        time.sleep(0.5)\n"
    '        print("modelkiln model=slow phase=load seconds=0.5", flush=True)\n\n    def execute',
)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ready") / "repo"
    write_python_model(path, "slow", SLOW)
    return path


def test_the_start_is_timed_by_phase(repository):
    with serve(repository, log=repository.parent / "log") as served:
        start = served.ready["start"]["slow"]
    assert start["phases"]["load"] == 0.5
    assert list(start["phases"]) == ["server", "load", "other"]
    assert sum(start["phases"].values()) == pytest.approx(start["seconds"], abs=0.01)


def test_a_budget_that_is_missed_is_an_error_with_its_phases(repository):
    done = run_compile("serve", repository, *FREE_PORTS, "--ready-within", "400ms")
    assert done.returncode == 1
    assert "error: model 'slow' was READY" in done.stderr and "load 0.5" in done.stderr
    assert "its budget is 0.4 s" in done.stderr
    assert "READY: slow" in done.stdout and "0.4 s missed" in done.stdout


def test_a_budget_is_a_time(repository):
    done = run_compile("serve", repository, "--ready-within", "soon")
    assert done.returncode == 2
    assert "--ready-within is 'soon'; allowed: a time such as 10s or 500ms" in done.stderr


def test_f01_shared_memory_that_is_too_small_is_told_before_the_start(repository):
    """A region of a tebibyte for each instance does not fit; then Triton's stub fails as it does in 64 MB."""
    region = f"--backend-config=python,shm-default-byte-size={1 << 40}"
    done = run_compile("serve", repository, *FREE_PORTS, "--server-arg", region, "--ready-timeout", 20)
    assert done.returncode != 0
    warning = next(line for line in done.stderr.splitlines() if line.startswith("warning: /dev/shm is too small"))
    assert "1 instances need 1048576 MiB" in warning and "--shm-size" in warning


def test_f01_instances_are_added_up_over_models_and_gpus(tmp_path):
    write_python_model(tmp_path, "one")
    write_python_model(tmp_path, "four", config=PYTHON_CONFIG.replace("count: 1", "count: 4"))
    gpus = PYTHON_CONFIG.replace("kind: KIND_CPU count: 1", "kind: KIND_GPU count: 2 gpus: [0, 1, 2]")
    write_python_model(tmp_path, "on_gpus", config=gpus)
    (tmp_path / "ensemble").mkdir()
    (tmp_path / "ensemble" / "config.pbtxt").write_text('platform: "ensemble"')
    need = shared_memory_need(Repository(tmp_path))
    assert (need.instances, need.total_bytes) == (11, 11 << 20)
    assert need.beside(5 << 20) == "5 MiB free; the repository's 11 instances need 11 MiB and room for tensors"
    flag = "--backend-config=python,shm-default-byte-size=67108864"
    assert shared_memory_need(Repository(tmp_path), [flag]).total_bytes == 11 << 26


@pytest.mark.parametrize(
    ("code", "config", "complete"),
    [
        (PYTHON_MODEL, PYTHON_CONFIG, True),
        (PYTHON_MODEL, 'backend: "python"', False),
        (
            PYTHON_MODEL + "\n    @staticmethod\n    def auto_complete_config(c):\n        return c\n",
            PYTHON_CONFIG,
            False,
        ),
        (PYTHON_MODEL, PYTHON_CONFIG.replace('"python"', '"onnxruntime"'), False),  # not published by us
        (PYTHON_MODEL, "not a config", False),
    ],
)
def test_whether_triton_must_complete_the_configs(code, config, complete, tmp_path):
    write_python_model(tmp_path, "m", code, config)
    write_python_model(tmp_path, "whole")
    assert configs_are_complete(Repository(tmp_path)) is complete


def test_a_published_model_is_complete(tmp_path):
    write_python_model(tmp_path, "m", PYTHON_MODEL, PYTHON_CONFIG.replace('"python"', '"onnxruntime"'))
    manifest = {"schema": 1, "model": "m", "version": 1, "files": {}}
    (tmp_path / "m" / "1" / "manifest.json").write_text(json.dumps(manifest))
    assert Repository(tmp_path).latest("m") is not None
    assert configs_are_complete(Repository(tmp_path))
