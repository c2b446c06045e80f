"""Models that work through others on the real server: ensembles with their members, Python models that call them."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from clients import ClientError, GrpcClient
from compiler.addresses import ServerOptions
from compiler.server import TritonServer
from compiler.stubs import living_stubs
from perf.cli import main as perf_report
from perf.report import from_json
from tests.serving import PYTHON_CONFIG, PYTHON_MODEL, serve, write_python_model

EXPLICIT = "--model-control-mode=explicit"
ENSEMBLE = """
platform: "ensemble" max_batch_size: 4
input {{ name: "x" data_type: TYPE_FP32 dims: [-1] }} output {{ name: "y" data_type: TYPE_FP32 dims: [-1] }}
ensemble_scheduling {{ {steps} }}
"""
STEP = """step {{ model_name: "{model}" model_version: -1
  input_map {{ key: "x" value: "{source}" }} output_map {{ key: "y" value: "{result}" }} }}
"""
# d11: a buffer that the next call overwrites at once; as it is, or a view whose rows lie side by side.
REUSES = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.buffer = np.zeros(4 * 4096, np.float32)

    def execute(self, requests):
        answers = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            rows, columns = x.shape
            flat = self.buffer[: x.size]
            view = flat.reshape(columns, rows).T if columns % 2 else flat.reshape(rows, columns)
            view[:] = x
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", view)]))
        return answers
"""
# d17: calls `inner` once for each request, or once for all.
CALLS = """
import numpy as np
import triton_python_backend_utils as pb_utils

def call(x):
    request = pb_utils.InferenceRequest(
        model_name="inner", requested_output_names=["y"], inputs=[pb_utils.Tensor("x", x)]
    )
    answer = request.exec()
    assert not answer.has_error(), answer.error().message()
    return pb_utils.get_output_tensor_by_name(answer, "y").as_numpy()

class TritonPythonModel:
    def execute(self, requests):
        inputs = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        {outputs}
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", y)]) for y in outputs]
"""
ONE_BY_ONE = "outputs = [call(x) for x in inputs]"
ALL_AT_ONCE = "outputs = np.split(call(np.concatenate(inputs)), np.cumsum([len(x) for x in inputs])[:-1])"
BATCHING = (
    PYTHON_CONFIG.replace("max_batch_size: 4", "max_batch_size: 32").replace("[ -1 ]", "[ 2 ]")
    + "dynamic_batching { max_queue_delay_microseconds: 100000 }\n"
)


def write_ensemble(repository: Path, name: str, *members: str) -> None:
    """Writes a chain of models."""
    names = ["x", *(f"between{index}" for index in range(1, len(members))), "y"]
    steps = [STEP.format(model=m, source=names[i], result=names[i + 1]) for i, m in enumerate(members)]
    (repository / name / "1").mkdir(parents=True)
    (repository / name / "config.pbtxt").write_text(ENSEMBLE.format(steps="".join(steps)))


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ensembles") / "repo"
    for name in ("first", "shared", "last"):
        write_python_model(path, name)
    write_python_model(path, "reuses", REUSES)
    write_python_model(path, "inner", PYTHON_MODEL, BATCHING.replace("100000", "0"))
    for name, outputs in (("one_by_one", ONE_BY_ONE), ("all_at_once", ALL_AT_ONCE)):
        write_python_model(path, name, CALLS.format(outputs=outputs), BATCHING)
    write_ensemble(path, "pipe", "first", "shared")
    write_ensemble(path, "other", "shared", "last")
    write_ensemble(path, "outer", "pipe", "last")
    write_ensemble(path, "through", "reuses", "first")
    return path


@dataclass(frozen=True)
class Running:
    server: TritonServer
    client: GrpcClient

    @property
    def ready(self) -> set[str]:
        """The models that answer that they are ready, each asked for itself."""
        names = ("first", "shared", "last", "pipe", "other", "outer", "through", "reuses")
        return {name for name in names if self.client.model_ready(name)}


@pytest.fixture(scope="module")
def running(repository: Path) -> Iterator[Running]:
    """A server that loads what it is told to: nothing at first."""
    options = ServerOptions(repository, http_port=0, grpc_port=0, metrics_port=0, extra=(EXPLICIT,))
    with TritonServer(options) as server, GrpcClient(server.addresses.grpc) as client:
        yield Running(server, client)


def test_d09_an_ensemble_is_loaded_with_its_members_however_deep(running):
    assert running.ready == set()
    running.server.control.load("outer")
    assert running.ready == {"outer", "pipe", "first", "shared", "last"}  # on return, without a wait
    x = np.array([[1.5, -2.5]], np.float32)
    assert np.array_equal(running.client.infer("outer", {"x": x})["y"], x)
    running.server.control.unload("outer")
    assert running.ready == set()


def test_d10_what_is_loaded_after_an_ensemble_is_what_was_before(running):
    """Five times, beside an ensemble that shares a member, and a member that was loaded by its own name."""
    control, pid = running.server.control, running.server.pid
    assert pid is not None and _processes_become(pid, set())  # those of the test before have ended
    control.load("other")
    control.load("first")
    before = running.ready
    assert before == {"other", "shared", "last", "first"}
    processes = {stub.pid for stub in living_stubs(pid)}
    for _ in range(5):
        control.load("outer")
        assert running.ready == before | {"outer", "pipe"}
        control.unload("outer")
        assert running.ready == before
    assert _processes_become(pid, processes)  # no process of a member stays, either
    control.unload("other")
    assert running.ready == {"first"}
    control.unload("first")
    assert running.ready == set() and _processes_become(pid, set())


def _processes_become(server_pid: int, expected: set[int]) -> bool:
    """Waits for them: the server answers an unload before the model's process has ended."""
    deadline = time.monotonic() + 30
    while (found := {stub.pid for stub in living_stubs(server_pid)}) != expected and time.monotonic() < deadline:
        time.sleep(0.01)
    return found == expected


def test_d11_a_step_may_answer_with_a_view_of_a_buffer_that_it_uses_again(running):
    running.server.control.load("through")
    wrong: list[np.ndarray] = []

    def call(seed: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(50):
            x = random.standard_normal((int(random.integers(1, 5)), int(random.integers(1, 4096)))).astype(np.float32)
            if not np.array_equal(running.client.infer("through", {"x": x})["y"], x):
                wrong.append(x)

    threads = [threading.Thread(target=call, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    running.server.control.unload("through")
    assert wrong == []


@pytest.mark.parametrize(("name", "whole"), [("one_by_one", False), ("all_at_once", True)])
def test_d17_the_report_tells_in_which_batches_a_python_model_calls_another(running, tmp_path, name, whole):
    for model in ("inner", name):
        running.server.control.load(model)
    words = ["run", "-m", name, "-u", running.server.addresses.grpc, "--output-dir", str(tmp_path)]
    words += ["--concurrency-range", "20", "--request-count", "80", "--json"]
    done = CliRunner().invoke(perf_report, words)
    for model in (name, "inner"):
        running.server.control.unload(model)
    assert done.exit_code == 0, done.output
    (one,) = from_json(done.stdout, "x").levels[0].measurements
    activity = {model.model: model for model in one.server}
    outer, inner = activity[name], activity["inner"]
    assert set(activity) == {name, "inner"} and (outer.inferences, inner.inferences) == (80, 80)
    assert outer.mean_batch is not None and outer.mean_batch > 2  # it was merged, so there is something to take apart
    assert inner.batches == (outer.batches if whole else {"1": 80})
    shown = CliRunner().invoke(perf_report, ["show", str(tmp_path / "report.json")]).stdout
    shown = " ".join(shown.split())
    inner_mean = outer.mean_batch if whole else 1
    assert f"{name} was executed in batches of {outer.mean_batch:.1f} on average" in shown
    assert f"and meanwhile inner of {inner_mean:.1f}: where it calls them" in shown


def test_e06_a_server_that_died_comes_back_with_the_models_that_it_had(repository):
    """Told to load one ensemble: with its members, and so again. Without being told it loads all (test_supervision)."""
    expected = {"pipe", "first", "shared"}
    x = np.array([[1.5, -2.5]], np.float32)
    with (
        serve(repository, f"--server-arg={EXPLICIT}", "--server-arg=--load-model=pipe") as served,
        GrpcClient(served.grpc) as client,
    ):
        assert set(served.models) == set(client.model_names()) == expected
        os.kill(served.triton_pid, signal.SIGKILL)
        deadline = time.monotonic() + 60
        answer = None
        while answer is None and time.monotonic() < deadline:
            try:
                answer = client.infer("pipe", {"x": x})["y"] if client.is_ready() else None
            except ClientError:
                answer = None
            time.sleep(0.05)
        assert answer is not None and np.array_equal(answer, x)
        assert set(client.model_names()) == expected
        assert all(client.model_ready(name) for name in expected)
