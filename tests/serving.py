"""Helpers that run the commands as a user does, in processes of their own."""

from __future__ import annotations

import atexit
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from backends.llm.engine.load import SETTINGS_FILE
from compiler.llm.config import llm_config
from compiler.triton_config import CONFIG_FILE, text_from_config
from compiler.triton_install import link_or_copy

ROOT = Path(__file__).parents[1]
COMPILE = [sys.executable, "-m", "compiler.cli"]
TIMEOUT_S = 300
FREE_PORTS = ("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0")


def environment(**extra: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}".rstrip(":"), **extra}


def run_compile(
    *arguments: object, cwd: Path | None = None, fresh: bool = False, **extra: str
) -> subprocess.CompletedProcess[str]:
    """Runs `compile` in a process of its own and returns exit code, stdout and stderr.

    Args:
        fresh: in a new interpreter; else in a fork of one that has the libraries imported (see tests/warm.py), which is
            three seconds less. What sets Python's own variables, or starts further builds, is always in a new one.
    """
    words = [str(argument) for argument in arguments]
    if fresh or "-j" in words or any(name.startswith("PYTHON") for name in extra):
        return subprocess.run(
            [*COMPILE, *words],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
            cwd=cwd,
            env=environment(**extra),
        )
    return _warm().run(words, str(cwd or Path.cwd()), environment(**extra))


class _Warm:
    """The process of tests/warm.py, for as long as the tests run."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.warm"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment()
        )
        atexit.register(self._process.communicate)  # it ends where its input does

    def run(self, words: list[str], cwd: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
        assert self._process.stdin is not None and self._process.stdout is not None
        with tempfile.TemporaryDirectory(prefix="modelkiln-test-run-") as folder:
            files = {name: Path(folder, name) for name in ("stdout", "stderr")}
            for file in files.values():
                file.touch()
            request = {"arguments": words, "cwd": cwd, "environment": env, "timeout_s": TIMEOUT_S}
            request |= {name: str(file) for name, file in files.items()}
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
            assert answer, "tests/warm.py has ended; its last words are above"
            code = int(answer)
            if code == -signal.SIGALRM:
                raise subprocess.TimeoutExpired(words, TIMEOUT_S)
            return subprocess.CompletedProcess(words, code, *(file.read_text() for file in files.values()))


@functools.cache
def _warm() -> _Warm:
    return _Warm()


@dataclass(frozen=True)
class Served:
    """A running `compile serve`."""

    process: subprocess.Popen[str]
    http: str
    grpc: str
    metrics: str
    models: list[str]
    triton_pid: int
    openai: str = ""
    openai_pid: int = 0
    ready: dict[str, Any] = field(default_factory=dict)  # all that the command printed


@contextmanager
def serve(repository: Path, *arguments: str, log: Path | None = None, **extra: str) -> Iterator[Served]:
    """Runs `compile serve` on free ports and yields when it is READY; stops it by SIGTERM.

    Its stderr goes to `log`: a server that writes much would stop at a pipe that nobody reads.
    """
    command = [*COMPILE, "serve", str(repository), *FREE_PORTS, "--json", *arguments]
    with ExitStack() as stack:
        stderr = subprocess.PIPE if log is None else stack.enter_context(open(log, "w"))
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment(**extra))
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line.startswith('{"ready"'):
            reason = process.stderr.read() if process.stderr else log.read_text() if log else ""
            raise AssertionError(f"compile serve did not start: {line}{reason}")
        ready: dict[str, Any] = json.loads(line)
        addresses = ready["http"], ready["grpc"], ready["metrics"]
        front = ready.get("openai", ""), ready.get("openai_pid", 0)
        yield Served(process, *addresses, ready["models"], ready["pid"], *front, ready)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)


def processes_in_session(session: int) -> list[int]:
    """Returns the living processes of a session (zombies left out)."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(entry.name))
    return found


PYTHON_MODEL = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", x)]))
        return answers
"""
PYTHON_CONFIG = """
backend: "python"
max_batch_size: 4
input { name: "x" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ -1 ] }
instance_group { kind: KIND_CPU count: 1 }
"""


def write_python_model(repository: Path, name: str, code: str = PYTHON_MODEL, config: str = PYTHON_CONFIG) -> Path:
    """Writes a hand-made model, as somebody's repository may hold it."""
    folder = repository / name
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(code)
    (folder / "config.pbtxt").write_text(config)
    return folder


def write_llm(repository: Path, name: str, model: Path, **engine: object) -> Path:
    """Writes what `compile llm` publishes of a GGUF file, without its proof; returns the version folder.

    Args:
        engine: options of `engine_settings`.
    """
    folder = repository / name / "1"
    folder.mkdir(parents=True)
    link_or_copy(str(model), str(folder / "model.gguf"))
    (folder / SETTINGS_FILE).write_text(json.dumps({"model": "model.gguf", **engine}))
    (folder.parent / CONFIG_FILE).write_text(text_from_config(llm_config(name, "KIND_CPU")))
    return folder
