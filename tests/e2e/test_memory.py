"""d15: the memory of a server under load does not rise with the requests that it has answered."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from clients import GrpcClient
from compiler.addresses import ServerOptions
from compiler.server import TritonServer
from perf.arrivals import ClosedLoop
from perf.load_generator import Target
from perf.measurement import Settings, measure_level
from perf.session import Question, build_workload
from perf.workload import GeneratorOptions
from tests.e2e.test_ensembles import write_ensemble
from tests.serving import processes_in_session, write_python_model

WORKERS = 20
MIB = 1 << 20


LEAKS = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def initialize(self, args):
        self.seen, self.kept = 0, []

    def execute(self, requests):
        answers = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            self.seen += 1
            if self.seen % 4 == 0:
                self.kept.append(x.copy())
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", x)]))
        return answers
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    repository = tmp_path_factory.mktemp("memory") / "repo"
    for name in ("first", "second"):
        write_python_model(repository, name)
    write_python_model(repository, "leaks", LEAKS)
    write_ensemble(repository, "identity", "first", "second")
    write_ensemble(repository, "leaking", "first", "leaks")
    # All models from the start to the end: a process that comes or goes between two readings is no leak.
    with TritonServer(ServerOptions(repository, http_port=0, grpc_port=0, metrics_port=0)) as found:
        yield found


def memory_bytes(server: TritonServer) -> int:
    """Resident bytes of the server and of its models' processes; what they share counts for each."""
    assert server.pid is not None
    pages = 0
    for pid in processes_in_session(server.pid):
        pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def load(server: TritonServer, model: str, requests: int, values: int) -> None:
    """Sends requests of so many float32 to a model that answers what it gets."""
    generator = GeneratorOptions(shapes={"x": (values,)})
    question = Question(model, Target(server.addresses.grpc, "grpc"), generator=generator)
    with GrpcClient(server.addresses.grpc) as client:
        workload = build_workload(client.metadata(model), question)
    measured = measure_level(question.target, workload, ClosedLoop(WORKERS), Settings(request_count=requests))
    assert (measured.completed, measured.failed) == (requests, 0)


def growth(readings: list[tuple[int, int]]) -> float:
    """Bytes for each request: the line of least squares through (requests so far, bytes)."""
    requests, held = np.array(readings, float).T
    return float(np.polyfit(requests, held, 1)[0])


@pytest.mark.parametrize("model", ["identity", "leaking"])
def test_d15_no_tensor_stays_behind(server: TritonServer, model: str) -> None:
    """64 KiB each way and between the steps; a model that keeps one in four shows that one in eight would be found."""
    readings = []
    for turn in range(6):
        load(server, model, 200, 16384)
        readings.append((turn * 200, memory_bytes(server)))  # the first one when it is warm
    leaks = growth(readings) > 65536 / 8
    assert leaks == (model == "leaking"), readings


@pytest.mark.soak
def test_d15_memory_stays_level_for_minutes(server: TritonServer) -> None:
    """20 callers for five minutes, after one minute of them: 0.5 MiB for 10,000 requests and 16 MiB in all."""
    readings: list[tuple[int, int]] = []
    sent, begun = 0, time.monotonic()
    while (lasted := time.monotonic() - begun) < 360:
        if lasted > 60:
            readings.append((sent, memory_bytes(server)))
        load(server, "identity", 2000, 16)
        sent += 2000
    held = [size for _, size in readings]
    per_10_000 = growth(readings) * 10_000 / MIB
    print(f"{sent} requests, {held[0] / MIB:.1f} to {held[-1] / MIB:.1f} MiB, {per_10_000:.3f} MiB for 10,000 requests")
    assert per_10_000 <= 0.5 and max(held) - held[0] <= 16 * MIB, readings
