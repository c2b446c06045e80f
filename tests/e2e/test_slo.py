"""`compile build --slo` on a real tritonserver: every candidate is served, the choice is by what was measured."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compiler.conftest import SPEC
from tests.compiler.test_cli import MODEL
from tests.serving import environment, run_compile


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("slo")
    (folder / "slo_model.py").write_text("import torch\nfrom torch import nn\n" + MODEL)
    (folder / "spec.yaml").write_text(SPEC.replace("FACTORY", "slo_model:build").lstrip())
    return folder


@pytest.fixture(scope="module")
def built(project: Path):
    """The result of a build among two targets, under a limit that any machine keeps."""
    flags = ("--target", "auto", "--slo", "p99=20s", "--concurrency", "4", "--json")
    done = run_compile("build", project / "spec.yaml", "-r", project / "repo", *flags)
    assert done.returncode == 0, done.stderr
    [model] = json.loads(done.stdout)["models"]
    return model, done.stderr


def test_each_candidate_was_served_and_the_greatest_goodput_ships(built):
    model, _ = built
    manifest = model["manifest"]
    served = {c["target"]: c["served"] for c in manifest["candidates"] if not c["refused"]}
    assert {"onnxruntime", "openvino"} <= set(served)
    for figures in served.values():
        assert figures["failed"] == 0 and 0 < figures["p50_ms"] <= figures["percentile_ms"] <= 20_000
        assert 0 < figures["goodput_rps"] <= figures["throughput_rps"] + 0.01 and figures["samples"] > 0
    best = max((c for c in manifest["candidates"] if c["served"]), key=lambda c: c["served"]["goodput_rps"])
    assert (manifest["target"], manifest["precision"]) == (best["target"], best["precision"])
    assert manifest["slo"] == {"percentile": 99.0, "limit_ms": 20_000.0, "concurrency": 4}


def test_the_table_stands_in_the_output(built):
    model, stderr = built
    assert "small: [6/7] serve the candidates" in stderr and "[7/7] publish" in stderr
    assert "p99=20000ms at concurrency 4, one row per request at the opt sizes:" in stderr
    header = next(line for line in stderr.splitlines() if "good/s" in line)
    assert header.split() == ["candidate", "ms", "cosine", "p50", "ms", "p99", "ms", "good/s", "all/s", "MB"]
    assert f"{model['manifest']['target']} fp32" in next(line for line in stderr.splitlines() if "shipped" in line)


def test_no_candidate_that_meets_it_is_a_refusal_with_the_table_and_nothing_is_published(project, built):
    flags = ("--slo", "p99=0.001ms", "--json")
    done = run_compile("build", project / "spec.yaml", "-r", project / "other", *flags)
    assert done.returncode == 1 and not (project / "other").exists()
    message = json.loads(done.stdout)["error"]["message"]
    assert message.startswith("no candidate meets p99=0.001ms at concurrency 1:\n  candidate ")
    assert "onnxruntime fp32" in message and "misses the SLO" in message


def test_without_a_server_it_is_refused_before_anything_slow_with_the_install_command(project):
    code = "import sys; sys.modules['pytriton'] = None; from compiler.cli import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", code, "build", str(project / "spec.yaml"), "-r", str(project / "none")]
    command += ["--slo", "p99=1s", "--force"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment())
    assert done.returncode == 3 and "pip install" in done.stderr and "load the model" not in done.stderr


# Sends Ctrl-C from inside, when the server is up and the load begins, so that the moment is certain.
INTERRUPTED = """
import os, signal, sys
import perf.measurement as measurement
measurement.measure_level = lambda *arguments: os.kill(os.getpid(), signal.SIGINT)
from compiler.cli import main
main(sys.argv[1:])
"""


def test_ctrl_c_under_load_stops_the_server_and_publishes_nothing(project, built, tmp_path):
    command = [sys.executable, "-c", INTERRUPTED, "build", str(project / "spec.yaml"), "-r", str(tmp_path / "repo")]
    env = environment(TMPDIR=str(tmp_path))  # the server's command line has this path
    done = subprocess.run([*command, "--slo", "p99=1s"], capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 130 and done.stderr.endswith("small: not published\ninterrupted\n"), done.stderr
    assert not (tmp_path / "repo").exists()
    assert [line for line in _command_lines() if str(tmp_path).encode() in line] == []


def _command_lines() -> list[bytes]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            found.append(path.read_bytes())
    return found


def test_concurrency_alone_is_a_mistake(project):
    done = run_compile("build", project / "spec.yaml", "--concurrency", "4")
    assert done.returncode == 2 and "there is no --slo" in done.stderr
