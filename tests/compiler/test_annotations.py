"""GitHub's annotations: escaped as its runner wants them, on the file and line that an error is about."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from compiler.annotations import Annotation, workflow_command
from tests.compiler.test_side_by_side import STEP
from tests.serving import run_compile, write_python_model


@pytest.mark.parametrize(
    ("annotation", "expected"),
    [
        (Annotation("error", "t", "plain"), "::error title=t::plain"),
        (
            Annotation("error", "a: b, c", "100 % wrong\r\nsecond: line, with ::"),
            "::error title=a%3A b%2C c::100 %25 wrong%0D%0Asecond: line, with ::",
        ),
        (Annotation("warning", "t", "m", Path("a,b.yaml"), 7), "::warning file=a%2Cb.yaml,line=7,title=t::m"),
        (Annotation("notice", "t", "m", Path("a.yaml")), "::notice file=a.yaml,title=t::m"),
        (Annotation("error", "t", "%0A\n", None, 3), "::error title=t::%250A%0A"),
    ],
)
def test_commands_are_escaped(annotation, expected, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert workflow_command(annotation, Path(".")) == expected


def test_files_are_named_from_the_workspace(tmp_path):
    inside = Annotation("error", "t", "m", tmp_path / "specs" / "a.yaml", 1)
    assert workflow_command(inside, tmp_path) == "::error file=specs/a.yaml,line=1,title=t::m"
    assert f"file={tmp_path}/specs/a.yaml," in workflow_command(inside, tmp_path / "elsewhere")


@pytest.fixture
def specs(tmp_path: Path) -> Path:
    (tmp_path / "step.py").write_text("class TritonPythonModel:\n    pass\n")
    for name in ("s1", "s2", "s3"):
        (tmp_path / f"{name}.yaml").write_text(STEP.replace("NAME", name))
    return tmp_path


def _run(folder, *arguments):
    return run_compile(*arguments, "--format", "github", cwd=folder, GITHUB_WORKSPACE=str(folder))


def _commands(done) -> list[str]:
    return [line for line in done.stdout.splitlines() if line.startswith("::")]


def test_a_mistake_in_a_spec_is_shown_at_its_line(specs):
    (specs / "s1.yaml").write_text((specs / "s1.yaml").read_text().replace("outputs:", "output:"))
    done = _run(specs, "build", "s1.yaml")
    assert done.returncode == 2 and done.stderr.startswith("error: s1.yaml:5: unknown key 'output'")
    [command] = _commands(done)
    assert command.startswith("::error file=s1.yaml,line=5,title=modelkiln%3A spec::unknown key 'output' in the spec")


def test_without_the_format_there_are_no_commands(specs):
    (specs / "s1.yaml").write_text("name: s1\n")
    assert run_compile("build", "s1.yaml", cwd=specs, GITHUB_ACTIONS="true").stdout == ""


def test_a_model_that_is_refused_is_shown_at_its_own_line(specs):
    code = "from torch import nn\nclass Model(nn.Module):\n    def forward(self, x):\n        return x.view(4, -1)[9]\n"
    (specs / "bad_model.py").write_text(code)
    (specs / "s1.yaml").write_text(
        STEP.replace("NAME", "s1").replace("{python: step.py}", "{factory: bad_model:Model}")
    )
    done = _run(specs, "build", "s1.yaml")
    assert done.returncode == 1
    [command] = _commands(done)
    assert command.startswith("::error file=bad_model.py,line=4,title=modelkiln%3A refused::")
    assert "%0A  hint: " in command


def test_each_build_that_failed_side_by_side_is_shown(specs):
    for name in ("s1", "s2"):
        text = STEP.replace("NAME", name).replace("{python: step.py}", "{factory: nothing:build}")
        (specs / f"{name}.yaml").write_text(text)
    done = _run(specs, "build", "s1.yaml", "s2.yaml", "s3.yaml", "-j", "2", "-r", "repo")
    assert done.returncode == 2
    assert sorted(command.partition("::source.factory")[0] for command in _commands(done)) == [
        "::error file=s1.yaml,line=2,title=modelkiln%3A spec",
        "::error file=s2.yaml,line=2,title=modelkiln%3A spec",
    ]
    assert any(line.startswith("s3 version 1: built") for line in done.stdout.splitlines())


def test_check_shows_findings_at_the_config(tmp_path):
    write_python_model(tmp_path / "repo", "good")
    folder = write_python_model(tmp_path / "repo", "bad")
    config = folder / "config.pbtxt"
    config.write_text(config.read_text() + "no_such_field: 1\n")
    write_python_model(tmp_path / "repo", "empty")
    shutil.rmtree(tmp_path / "repo" / "empty" / "1")
    done = _run(tmp_path, "check", "repo")
    assert done.returncode == 1
    bad, empty = _commands(done)
    lines = len(config.read_text().splitlines())
    assert bad.startswith(f"::error file=repo/bad/config.pbtxt,line={lines},title=modelkiln%3A check::bad: not a valid")
    assert empty.startswith("::error file=repo/empty/config.pbtxt,title=modelkiln%3A check::empty: there is no version")


def test_more_than_github_shows_are_counted(tmp_path):
    for number in range(12):
        folder = write_python_model(tmp_path / "repo", f"m{number:02}")
        shutil.rmtree(folder / "1")
    commands = _commands(_run(tmp_path, "check", "repo"))
    assert len(commands) == 11 and commands[-1] == "::notice title=modelkiln::2 more are in the log"


def test_json_and_github_do_not_go_together(specs):
    done = _run(specs, "build", "s1.yaml", "--json")
    assert done.returncode == 2 and "both write to stdout" in done.stderr
