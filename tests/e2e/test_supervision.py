"""What dies under `compile serve` is brought back; nothing else notices, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpc_client
from tritonclient.utils import InferenceServerException

from compiler.shared_memory import shared_memory_prefix
from compiler.stubs import Stub, living_stubs
from tests.serving import PYTHON_CONFIG, PYTHON_MODEL, Served, serve, write_python_model

# Ends its own process where it is told to, as a crash in a library would.
CRASHES = PYTHON_MODEL.replace("import triton", "import os\nimport triton").replace(
    "answers.append", "if x.min() < 0:\n                os._exit(3)\n            answers.append"
)
ENSEMBLE = """
platform: "ensemble" max_batch_size: 4
input { name: "x" data_type: TYPE_FP32 dims: [-1] } output { name: "y" data_type: TYPE_FP32 dims: [-1] }
ensemble_scheduling { step { model_name: "victim" model_version: -1
  input_map { key: "x" value: "x" } output_map { key: "y" value: "y" } } }
"""


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("supervision") / "repo"
    write_python_model(path, "victim", CRASHES, PYTHON_CONFIG.replace("count: 1", "count: 2"))
    write_python_model(path, "other")
    (path / "through" / "1").mkdir(parents=True)
    (path / "through" / "config.pbtxt").write_text(ENSEMBLE)
    return path


@pytest.fixture(scope="module")
def served(repository: Path) -> Iterator[Served]:
    with serve(repository, "--max-restarts", "100") as server:
        yield server


@pytest.fixture
def client(served: Served) -> Iterator[Any]:
    with grpc_client.InferenceServerClient(served.grpc) as connection:
        yield connection


def _answer(client: Any, model: str, value: float = 1.5) -> float:
    tensor = grpc_client.InferInput("x", [1, 1], "FP32")
    tensor.set_data_from_numpy(np.array([[value]], dtype=np.float32))
    return float(client.infer(model, [tensor], client_timeout=10).as_numpy("y")[0, 0])


def _answers(client: Any, model: str) -> bool:
    try:
        return _answer(client, model) == 1.5
    except InferenceServerException:
        return False


def _wait(until: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if until():
            return True
        time.sleep(0.02)
    return until()


def _stubs(server_pid: int, model: str) -> set[Stub]:
    return {stub for stub in living_stubs(server_pid) if stub.model == model}


def _regions(serve_pid: int) -> set[str]:
    return {path.name for path in Path("/dev/shm").glob(shared_memory_prefix(serve_pid) + "*")}


class _Load:
    """Calls a model all the time, and counts what failed."""

    def __init__(self, served: Served, model: str) -> None:
        self.done, self.errors = 0, list[str]()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(served.grpc, model))

    def _run(self, address: str, model: str) -> None:
        with grpc_client.InferenceServerClient(address) as client:
            while not self._ended.is_set():
                try:
                    assert _answer(client, model) == 1.5
                    self.done += 1
                except (InferenceServerException, AssertionError) as error:
                    self.errors.append(str(error))

    def __enter__(self) -> _Load:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()


def test_a_killed_model_comes_back_and_no_other_model_notices(served, client):
    for _ in range(2):
        assert _wait(lambda: len(_stubs(served.triton_pid, "victim")) == 2, 10)
        assert _wait(lambda: len(_regions(served.process.pid)) == 3, 30)
        others = _stubs(served.triton_pid, "other")
        killed = min(_stubs(served.triton_pid, "victim"), key=lambda stub: stub.pid)
        with _Load(served, "other") as load:
            os.kill(killed.pid, signal.SIGKILL)
            assert _wait(lambda: not client.is_model_ready("victim"), 30), "its death was not noticed"
            assert not client.is_server_ready()
            assert _wait(lambda: _answers(client, "victim") and _answers(client, "through"), 60)
        assert load.errors == [] and load.done > 10
        assert _stubs(served.triton_pid, "other") == others
        assert client.is_server_ready()
    assert _wait(lambda: len(_regions(served.process.pid)) == 3, 30)
    assert killed.region not in _regions(served.process.pid)
    # Triton removes a region a moment before its process ends.
    assert _wait(lambda: {s.region for s in living_stubs(served.triton_pid)} == _regions(served.process.pid), 30)


def test_loading_needs_the_key_and_the_key_is_not_in_the_process_list(served, client):
    """Who may load a model may run code: the load call takes files along."""
    for call in (
        client.get_model_repository_index,
        lambda: client.load_model("other"),
        lambda: client.unload_model("other"),
    ):
        with pytest.raises(InferenceServerException, match="restricted"):
            call()
    arguments = Path(f"/proc/{served.triton_pid}/cmdline").read_bytes().split(b"\0")
    keys = [a.rpartition(b"=")[2] for a in arguments if b"restricted" in a]
    assert keys and all(set(key) == {ord("*")} for key in keys)
    assert _answer(client, "other") == 1.5


def test_a_crash_while_it_computes_is_answered_with_an_error(served, client):
    assert _wait(lambda: _answers(client, "victim"), 10)
    with pytest.raises(InferenceServerException, match=r"not healthy"):
        _answer(client, "victim", -1.0)
    assert _wait(lambda: _answers(client, "victim") and client.is_server_ready(), 20)


def test_f03_requests_that_raise_leave_no_shared_memory_behind(tmp_path):
    """Every third request raises, as a model's code may by mistake; its neighbours are answered."""
    code = PYTHON_MODEL.replace("    def execute", "    seen = 0\n    def execute").replace(
        "            x =",
        "            self.seen += 1\n            if self.seen % 3 == 0:\n"
        "                raise ValueError('every third')\n            x =",
    )
    write_python_model(tmp_path / "repo", "raises", code)
    quiet = ("--server-arg", "--log-error=false")  # a line for each would fill the pipe that nobody reads
    with serve(tmp_path / "repo", *quiet) as served, grpc_client.InferenceServerClient(served.grpc) as client:

        def used() -> int:
            return sum(
                path.stat().st_blocks for path in Path("/dev/shm").glob(f"{shared_memory_prefix(served.process.pid)}*")
            )

        def requests(count: int) -> list[bool]:
            return [_answers(client, "raises") for _ in range(count)]

        assert requests(90) == [True, True, False] * 30
        before, regions = used(), _regions(served.process.pid)
        assert requests(600) == [True, True, False] * 200
        assert used() == before and _regions(served.process.pid) == regions
        with pytest.raises(InferenceServerException, match="every third"):
            for _ in range(3):
                _answer(client, "raises")


def _children(pid: int) -> list[int]:
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return [int(line) for line in found.stdout.split()]


def test_what_dies_again_and_again_stays_down_and_a_killed_server_is_started_again(repository):
    with serve(repository, "--max-restarts", "1") as served, grpc_client.InferenceServerClient(served.grpc) as client:
        old = _stubs(served.triton_pid, "victim")
        with pytest.raises(InferenceServerException):
            _answer(client, "victim", -1.0)
        assert _wait(lambda: len(_stubs(served.triton_pid, "victim") - old) == 2, 30)
        assert _wait(lambda: _answers(client, "victim"), 20)
        with pytest.raises(InferenceServerException):
            _answer(client, "victim", -1.0)
        assert _wait(lambda: not client.is_model_ready("victim"), 30)
        assert not _wait(lambda: client.is_model_ready("victim"), 3)
        assert not client.is_server_ready()
        assert _answer(client, "other") == 1.5
        with pytest.raises(InferenceServerException, match="no available versions"):
            _answer(client, "victim")

        os.kill(served.triton_pid, signal.SIGKILL)  # a new server loads all models, on the same addresses
        assert _wait(lambda: _answers(client, "victim") and _answers(client, "other"), 30)
        (pid,) = _children(served.process.pid)
        assert pid != served.triton_pid
        assert _wait(lambda: {stub.region for stub in living_stubs(pid)} == _regions(served.process.pid), 30)
        assert len(living_stubs(pid)) == 3 and living_stubs(served.triton_pid) == frozenset()
        # What runs now is looked after as before.
        os.kill(min(_stubs(pid, "other"), key=lambda stub: stub.pid).pid, signal.SIGKILL)
        assert _wait(lambda: not client.is_model_ready("other"), 30)
        assert _wait(lambda: _answers(client, "other"), 20)
        served.process.send_signal(signal.SIGTERM)
        _, log = served.process.communicate(timeout=60)
    assert served.process.returncode == 0
    # It "stays down", or, where it died as soon as it was loaded, "has 1 of its 2 processes".
    assert "more than 1 deaths within 60 s are too many" in log
    assert "tritonserver ended by itself with code -9; it is started again" in log
    assert _regions(served.process.pid) == set()


def test_without_restarts_the_end_of_the_server_is_the_end(repository):
    with serve(repository, "--no-restart") as served:
        os.kill(served.triton_pid, signal.SIGKILL)
        _, log = served.process.communicate(timeout=30)
    assert served.process.returncode == 1
    assert "error: tritonserver ended by itself with code -9; nothing is started again" in log
    assert _regions(served.process.pid) == set()
