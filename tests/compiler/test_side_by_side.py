"""`compile build -j`: order, failures, output and interrupts of builds in processes of their own."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from compiler.parallel import TURNS_VARIABLE, Work, _environment, run_parallel
from compiler.turns import COMPARE
from tests.serving import COMPILE, environment, run_compile

STEP = """\
name: NAME
source: {python: step.py}
dims: {batch: {max: 4}}
inputs: [{name: x, dtype: float32, shape: [batch, 1]}]
outputs: [{name: y, dtype: float32, shape: [batch, 1]}]
"""
ENSEMBLE = "name: NAME\ninputs: [x]\noutputs: [y]\nsteps:\n  - {model: MEMBER, inputs: {x: x}, outputs: {y: y}}\n"


@pytest.fixture
def specs(tmp_path: Path) -> Path:
    """A folder with three steps that take no time, and ensembles of ensembles whose names sort before their members."""
    (tmp_path / "step.py").write_text("class TritonPythonModel:\n    pass\n")
    for name in ("s1", "s2", "s3"):
        (tmp_path / f"{name}.yaml").write_text(STEP.replace("NAME", name))
    for name, member in (("a_outer", "b_inner"), ("b_inner", "s1")):
        (tmp_path / f"{name}.yaml").write_text(ENSEMBLE.replace("NAME", name).replace("MEMBER", member))
    return tmp_path


@pytest.mark.parametrize("jobs", [1, 3])
def test_an_ensemble_of_an_ensemble_is_built_after_its_members(specs, jobs):
    done = run_compile("build", specs, "-r", specs / "repo", "-j", jobs, "--json")
    assert done.returncode == 0, done.stderr
    order = [m["model"] for m in json.loads(done.stdout)["models"]]
    assert sorted(order) == ["a_outer", "b_inner", "s1", "s2", "s3"]
    assert order.index("s1") < order.index("b_inner") < order.index("a_outer")


def test_d16_a_circle_of_ensembles_is_refused_before_anything_is_built(specs):
    (specs / "b_inner.yaml").write_text(ENSEMBLE.replace("NAME", "b_inner").replace("MEMBER", "a_outer"))
    done = run_compile("build", specs, "-r", specs / "repo", "-j", 2)
    assert done.returncode == 2 and not (specs / "repo").exists()
    assert "the ensembles need each other in a circle: a_outer -> b_inner -> a_outer" in done.stderr


def test_d16_a_circle_through_the_repository_is_refused(specs):
    assert run_compile("build", specs, "-r", specs / "repo").returncode == 0
    (specs / "b_inner.yaml").write_text(ENSEMBLE.replace("NAME", "b_inner").replace("MEMBER", "a_outer"))
    done = run_compile("build", specs / "b_inner.yaml", "-r", specs / "repo")
    assert done.returncode == 2
    assert "its members need each other in a circle: b_inner -> a_outer -> b_inner" in done.stderr


def test_a_failure_stops_what_needs_it_and_nothing_else(specs):
    text = (specs / "s1.yaml").read_text().replace("source: {python: step.py}", "source: {factory: nothing:build}")
    (specs / "s1.yaml").write_text(text)
    done = run_compile("build", specs, "-r", specs / "repo", "-j", 2, "--json")
    result = json.loads(done.stdout)
    assert done.returncode == 2 == result["error"]["exit_code"]
    assert sorted(m["model"] for m in result["models"]) == ["s2", "s3"]
    assert {f["model"]: f["lacks"] for f in result["failures"]} == {"s1": "", "b_inner": "s1", "a_outer": "b_inner"}
    assert "3 of 5 were not built: s1, b_inner, a_outer. The first, 's1': " in result["error"]["message"]
    assert "no module named 'nothing'" in result["error"]["message"] and result["error"]["kind"] == "spec"
    assert "b_inner: not built, since 's1' failed" in done.stderr


def test_the_output_of_each_model_stays_together(specs):
    done = run_compile("build", specs, "-r", specs / "repo", "-j", 3)
    names = re.findall(r"^(\w+): \[1/1\] publish .*\n    .*/(\w+)/1$", done.stderr, re.MULTILINE)
    assert sorted(names) == [(n, n) for n in ("a_outer", "b_inner", "s1", "s2", "s3")]
    assert len(done.stderr.splitlines()) == 10
    assert sorted(line.partition(" version 1: built in ")[0] for line in done.stdout.splitlines()) == sorted(
        n for n, _ in names
    )


def test_on_a_terminal_a_line_moves_on_stderr_and_the_results_stay_on_stdout(specs):
    main, other = pty.openpty()
    command = [*COMPILE, "build", str(specs), "-r", str(specs / "repo"), "-j", "2"]
    env = {**environment(TERM="xterm-256color"), "NO_COLOR": ""}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=other, text=True, env=env) as process:
        os.close(other)
        chunks = []
        with contextlib.suppress(OSError):  # the other end of a pty is closed this way
            while data := os.read(main, 65536):
                chunks.append(data)
        stdout = process.stdout.read()
    os.close(main)
    shown = b"".join(chunks).decode()
    assert sorted(line.split()[0] for line in stdout.splitlines()) == ["a_outer", "b_inner", "s1", "s2", "s3"]
    assert "building s1, s2; 3 more to come" in shown
    # Each plain line begins where the moving one was taken away.
    assert len(re.findall(r"(?:\x1b\[2K|\n)s1: \[1/1\] publish", shown)) == 1


def test_options_reach_every_build(specs):
    for _ in range(2):
        done = run_compile("build", specs, "-r", specs / "repo", "-j", 2, "--force", "--no-cache")
        assert done.returncode == 0, done.stderr
    assert done.stdout.count(" version 2: built in ") == 5


def test_a_build_that_is_killed_is_a_failure(specs):
    (specs / "killer.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    text = (specs / "s1.yaml").read_text().replace("source: {python: step.py}", "source: {factory: killer:build}")
    (specs / "s1.yaml").write_text(text)
    done = run_compile("build", specs / "s1.yaml", specs / "s2.yaml", "-r", specs / "repo", "-j", 2)
    assert done.returncode == 1 and done.stdout.startswith("s2 version 1: built in ")
    assert "1 of 2 were not built: s1. The first, 's1': its process ended with code -9" in done.stderr


def test_no_more_run_at_once_than_asked_for():
    seen = []
    work = [Work(str(n), ("--version",)) for n in range(5)]
    outcomes = run_parallel(work, 2, on_change=lambda running, waiting: seen.append((len(running), waiting)))
    assert max(seen) == (2, 3) and [o.exit_code for o in outcomes] == [0] * 5


def test_threads_are_divided_unless_the_user_says_how_many(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert _environment(3, tmp_path)["OMP_NUM_THREADS"] == "2"
    assert _environment(16, tmp_path)["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert _environment(3, tmp_path)["OMP_NUM_THREADS"] == "5"
    assert _environment(3, tmp_path)[TURNS_VARIABLE] == str(tmp_path)


HOLDS_A_TURN = """
import sys
from pathlib import Path
from compiler.progress import silent_stage
from compiler.turns import in_turns
with in_turns(silent_stage, Path(sys.argv[1]))(sys.argv[2]):
    print("in", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize(("stage", "others_may_work"), [("publish", True), (COMPARE, False)])
def test_what_is_timed_runs_alone(tmp_path, stage, others_may_work):
    lock = tmp_path / "turns"
    command = [sys.executable, "-c", HOLDS_A_TURN, str(lock), stage]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
    ) as other:
        assert other.stdout.readline() == "in\n"
        with lock.open("a") as probe:
            assert _may_take(probe, fcntl.LOCK_SH) is others_may_work
            assert not _may_take(probe, fcntl.LOCK_EX)
        other.communicate("\n")
    with lock.open("a") as probe:
        assert _may_take(probe, fcntl.LOCK_EX)


def _may_take(lock, kind: int) -> bool:
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


BLOCKED = """
import os
from pathlib import Path

def build():
    os.mkfifo(Path(__file__).parent / f"pid-{os.getpid()}")  # tells that this build is here
    with open(Path(__file__).parent / "never") as never:
        never.read()
"""


def test_ctrl_c_stops_every_build_and_leaves_no_process(tmp_path):
    os.mkfifo(tmp_path / "never")
    (tmp_path / "blocked.py").write_text(BLOCKED)
    for name in ("m1", "m2", "m3"):
        text = STEP.replace("NAME", name).replace("{python: step.py}", "{factory: blocked:build}")
        (tmp_path / f"{name}.yaml").write_text(text)
    command = [*COMPILE, "build", str(tmp_path), "-r", str(tmp_path / "repo"), "-j", "2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())
    # Opening a pipe for writing waits until a reader is there: both builds are in their factories.
    writers = [os.open(tmp_path / "never", os.O_WRONLY)]
    while len(pids := [int(p.name[4:]) for p in tmp_path.glob("pid-*")]) < 2:
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=120)
    os.close(writers[0])
    assert process.returncode == 130
    assert stderr.endswith("m1: not published\nm2: not published\nm3: not published\ninterrupted\n")
    assert "Traceback" not in stderr and not (tmp_path / "repo").exists()
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []
