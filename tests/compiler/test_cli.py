"""The command as a user and a CI pipeline see it: exit codes, streams, JSON, and what is left behind."""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from compiler.repository import Repository
from tests.compiler.conftest import SPEC
from tests.serving import COMPILE, environment, run_compile

MODEL = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(16, 3)
    def forward(self, x):
        return self.layer(x)
build = Model
"""


@pytest.fixture(scope="module")
def template(tmp_path_factory) -> Path:
    """A folder with a model, its spec, and a repository in which it was built once: a build takes seconds."""
    folder = tmp_path_factory.mktemp("template")
    (folder / "cli_model.py").write_text("import torch\nfrom torch import nn\n" + MODEL)
    (folder / "spec.yaml").write_text(SPEC.replace("FACTORY", "cli_model:build").lstrip())
    done = run_compile("build", folder / "spec.yaml", "-r", folder / "repo", fresh=True)
    assert done.returncode == 0, done.stderr
    (folder / "stdout").write_text(done.stdout)
    (folder / "stderr").write_text(done.stderr)
    return folder


@pytest.fixture
def built(template, tmp_path):
    """A copy of the template: (spec, repository, run)."""
    shutil.copytree(template, tmp_path, dirs_exist_ok=True)
    spec, repository = tmp_path / "spec.yaml", tmp_path / "repo"
    return spec, repository, lambda *extra: run_compile("build", spec, "-r", repository, *extra)


@pytest.fixture
def unbuilt(built):
    """The same, with no repository yet."""
    shutil.rmtree(built[1])
    return built


def test_a_build_prints_its_result_on_stdout_and_its_progress_on_stderr(template, built):
    stdout, stderr = (template / "stdout").read_text(), (template / "stderr").read_text()
    assert stdout.startswith("small version 1: built in ") and stdout.count("\n") == 1
    assert "small: [5/5] publish" in stderr
    assert "\x1b" not in stdout + stderr  # no colours in a pipe
    again = built[2]()
    assert again.stdout.startswith("small version 1: up to date in ") and again.stderr == ""


@pytest.mark.parametrize(
    "change",
    [
        lambda spec: spec.write_text(spec.read_text().replace("max: 8", "max: 9")),
        lambda spec: _append(spec.parent / "cli_model.py", "\nVALUE = 1\n"),
    ],
    ids=["spec", "code"],
)
def test_what_changes_the_model_builds_a_new_version(built, change):
    spec, _, run = built
    change(spec)
    assert run().stdout.startswith("small version 2: built")


def test_a_comment_in_the_spec_changes_nothing(built):
    spec, _, run = built
    spec.write_text("# a comment\n" + spec.read_text())
    assert "up to date" in run().stdout


def test_a_damaged_version_is_built_again(built):
    _, repository, run = built
    (repository / "small" / "1" / "model.onnx").write_bytes(b"cut")
    assert run().stdout.startswith("small version 2: built")


def test_force_builds_again_and_gives_the_same_bytes(built):
    _, repository, run = built
    assert run("--force", "--no-cache").stdout.startswith("small version 2: built")
    first, second = (repository / "small" / v / "model.onnx" for v in ("1", "2"))
    assert first.read_bytes() == second.read_bytes()


def test_json_is_one_document_on_stdout(unbuilt):
    _, repository, run = unbuilt
    result = json.loads(run("--json").stdout)
    assert [m["model"] for m in result["models"]] == ["small"]
    assert result["models"][0]["path"] == str(repository / "small" / "1")
    manifest = result["models"][0]["manifest"]
    assert manifest["parity"]["worst_cosine"] > 0.99999
    assert [c["bytes"] for c in manifest["candidates"]] == [manifest["files"]["model.onnx"]["bytes"]]
    assert [s["name"] for s in result["models"][0]["stages"]] == [
        "load the model",
        "run the reference",
        "export to ONNX",
        "optimise, write and prove",
        "publish",
    ]


def test_a_refused_model_exits_1_without_a_stack_trace(project, tmp_path):
    spec = project("class Model(nn.Module):\n    def forward(self, x):\n        return x.view(8, -1)\nbuild = Model\n")
    done = run_compile("build", spec, "-r", tmp_path / "repo", "--json")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr and "return x.view(8, -1)" in done.stderr
    error = json.loads(done.stdout)["error"]
    assert error["kind"] == "refused" and error["exit_code"] == 1 and error["hint"]
    assert not (tmp_path / "repo").exists()
    assert "Traceback" in run_compile("build", spec, "-r", tmp_path / "repo", "--debug").stderr


def test_a_wrong_spec_exits_2(unbuilt):
    spec, _, run = unbuilt
    spec.write_text(spec.read_text().replace("inputs:", "imputs:"))
    done = run()
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {spec}:5: unknown key 'imputs' in the spec (did you mean 'inputs'?)")


def test_a_mistake_in_the_last_spec_costs_no_build(unbuilt, tmp_path):
    spec, repository, _ = unbuilt
    bad = tmp_path / "bad.yaml"
    bad.write_text("name: bad\n")
    done = run_compile("build", spec, bad, "-r", repository)
    assert done.returncode == 2 and not repository.exists()


def test_json_of_a_failure_tells_what_was_done_before_it(built, tmp_path):
    spec, repository, _ = built
    bad = tmp_path / "z_bad.yaml"
    bad.write_text(
        spec.read_text().replace("name: small", "name: bad").replace("cli_model:build", "no_such_module:build")
    )
    done = run_compile("build", spec, bad, "-r", repository, "--json")
    assert done.returncode == 2
    result = json.loads(done.stdout)
    assert [(m["model"], m["built"]) for m in result["models"]] == [("small", False)]
    assert "no module named 'no_such_module'" in result["error"]["message"]


def test_two_specs_with_one_name_are_refused(unbuilt, tmp_path):
    spec, repository, _ = unbuilt
    twin = tmp_path / "twin.yaml"
    twin.write_text(spec.read_text())
    done = run_compile("build", spec, twin, "-r", repository)
    assert done.returncode == 2 and "two specs are named 'small'" in done.stderr


def test_a_missing_weight_file_exits_2_and_says_where_it_looked(unbuilt):
    spec, _, run = unbuilt
    spec.write_text(spec.read_text().replace("build}", "build, weights: w.safetensors}"))
    done = run()
    assert done.returncode == 2
    assert f"{spec}:2: no such file: w.safetensors" in done.stderr and "hint: looked for" in done.stderr


def test_a_hand_made_model_is_not_replaced(unbuilt):
    _, repository, run = unbuilt
    (repository / "small" / "1").mkdir(parents=True)
    (repository / "small" / "config.pbtxt").write_text("mine\n")
    done = run()
    assert done.returncode == 1 and "was not made by `compile build`" in done.stderr
    assert (repository / "small" / "config.pbtxt").read_text() == "mine\n"


STOPS = [
    *(
        ("killed", signal.SIGKILL, s)
        for s in ("run the reference", "export to ONNX", "optimise, write and prove", "publish")
    ),
    ("interrupted", signal.SIGINT, "optimise, write and prove"),
    ("interrupted", signal.SIGINT, "publish"),
]
# Sends the signal when a stage begins, from inside the process, so that the moment is certain.
STOPPED_BUILD = """
import contextlib, os, sys
import compiler.progress as progress
real = progress.terminal_stages
def stages(*arguments):
    inner = real(*arguments)
    @contextlib.contextmanager
    def stage(name):
        with inner(name) as log:
            if name == STAGE:
                os.kill(os.getpid(), NUMBER)
            yield log
    return stage
progress.terminal_stages = stages
from compiler.cli import main
main(sys.argv[1:])
"""


@pytest.mark.parametrize(("how", "number", "stage"), STOPS, ids=[f"{how}-{stage}" for how, _, stage in STOPS])
def test_a_build_that_is_stopped_leaves_the_repository_as_it_was(project, tmp_path, how, number, stage):
    spec, repository, files = project(MODEL), tmp_path / "repo", tmp_path / "files"
    files.mkdir()
    (files / "model.onnx").write_bytes(b"an older version")
    Repository(repository).publish("small", 'backend: "onnxruntime"\n', files, {})
    before = {p.relative_to(repository): p.read_bytes() for p in repository.rglob("*") if p.is_file()}
    code = STOPPED_BUILD.replace("STAGE", repr(stage)).replace("NUMBER", str(int(number)))
    command = [sys.executable, "-c", code, "build", str(spec), "-r", str(repository)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment())
    if how == "killed":
        assert done.returncode == -signal.SIGKILL, done.stderr
    else:
        assert (
            done.returncode == 130
            and done.stderr.endswith("small: not published\ninterrupted\n")
            and "Traceback" not in done.stderr
        )
    assert {p.relative_to(repository): p.read_bytes() for p in repository.rglob("*") if p.is_file()} == before
    if how == "killed" and stage == "publish":  # the next build works
        assert run_compile("build", spec, "-r", repository).stdout.startswith("small version 2: built")


def test_a_terminal_gets_a_live_line_and_no_color_is_respected(unbuilt):
    spec, repository, _ = unbuilt
    outputs = {}
    for name, extra in (("colour", {}), ("plain", {"NO_COLOR": "1"})):
        main, other = pty.openpty()
        command = [*COMPILE, "build", str(spec), "-r", str(repository), "--force"]
        env = {**environment(), "TERM": "xterm-256color", **extra}
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=other, env=env) as process:
            os.close(other)
            chunks = []
            try:
                while data := os.read(main, 65536):
                    chunks.append(data)
            except OSError:
                pass  # the other end of a pty is closed this way
            process.wait()
        os.close(main)
        outputs[name] = b"".join(chunks).decode()
    assert "[5/5] publish" in outputs["colour"] and "\x1b[3" in outputs["colour"]
    assert "[5/5] publish" in outputs["plain"] and "\x1b[3" not in outputs["plain"]


def test_check_speaks_json(built):
    _, repository, _ = built
    done = run_compile("check", repository, "--json")
    assert json.loads(done.stdout) == {"models": ["small"], "findings": []}
    (repository / "small" / "1" / "model.onnx").unlink()
    done = run_compile("check", repository, "--json")
    assert done.returncode == 1
    assert "version 1 has no model.onnx" in [f["message"] for f in json.loads(done.stdout)["findings"]]


def _append(path, text):
    path.write_text(path.read_text() + text)
