"""The load generator against a server whose latency and errors are known."""

from __future__ import annotations

import socket
import threading

import numpy as np
import pytest

from clients.types import ModelMetadata, TensorMetadata
from perf.arrivals import ClosedLoop, OpenLoop
from perf.errors import UsageError
from perf.load_generator import Target, run_closed, run_open
from perf.measurement import Settings, measure_level
from perf.metrics import nearest_rank, summarise_latency
from perf.workload import Workload, serialise
from tests.perf.fake_server import FakeServer

MODEL = ModelMetadata("fake", ("1",), (TensorMetadata("INPUT0", "FP32", (-1, 4)),), (), max_batch_size=8)


def workload_for(fake: FakeServer, distinct: int = 3) -> Workload:
    requests = [{"INPUT0": np.full((1, 4), index, np.float32)} for index in range(distinct)]
    return Workload(serialise(MODEL, requests, "http", fake.address), 1, "fixed inputs")


def target_of(fake: FakeServer, timeout_s: float = 10.0) -> Target:
    return Target(fake.address, "http", timeout_s)


def test_request_count_is_exact_and_payloads_go_round(fake: FakeServer) -> None:
    records = run_closed(target_of(fake), workload_for(fake), 4, request_count=30)
    assert (records.completed, records.failed, len(fake.requests)) == (30, 0, 30)
    assert sorted(fake.requests.count(body) for body in set(fake.requests)) == [10, 10, 10]


def test_warm_up_requests_are_sent_and_forgotten(fake: FakeServer) -> None:
    records = run_closed(target_of(fake), workload_for(fake), 2, warmup_requests=7, request_count=5)
    assert (records.completed, len(fake.requests)) == (5, 12)


def test_duration_ends_the_run_and_requests_end_inside(fake: FakeServer) -> None:
    records = run_closed(target_of(fake), workload_for(fake), 2, duration_s=0.2)
    assert records.completed > 0
    assert records.duration_s >= 0.2
    assert (records.done_ns >= records.start_ns).all() and (records.done_ns < records.end_ns).all()


def test_closed_loop_keeps_its_concurrency(fake: FakeServer) -> None:
    fake.latency_s = lambda number: 0.01
    records = run_closed(target_of(fake), workload_for(fake), 3, request_count=30)
    order = sorted([(at, 1) for at in records.sent_ns] + [(at, -1) for at in records.done_ns])
    assert np.cumsum([step for _, step in order]).max() == 3
    assert records.sent_ns.tolist() == records.intended_ns.tolist()


def test_latency_is_at_least_the_servers(fake: FakeServer) -> None:
    """Bimodal 5/50 ms, half of each: the lower half is above 5 ms, the upper half above 50 ms."""
    fake.latency_s = lambda number: 0.05 if number % 2 else 0.005
    records = run_closed(target_of(fake), workload_for(fake), 1, request_count=20)
    ordered = np.sort(records.latency_ms)
    assert nearest_rank(ordered, 5) >= 5
    assert nearest_rank(ordered, 50.01) >= 50
    assert np.count_nonzero(ordered >= 50) >= 10


def test_h07_ten_percent_of_500s(fake: FakeServer) -> None:
    fake.latency_s = lambda number: 0.0 if number % 10 == 9 else 0.005
    fake.answer = lambda number: (500, b'{"error":"every tenth"}') if number % 10 == 9 else (200, b"{}")
    settings = Settings(request_count=100, goodput_limits_ms={"request_latency": 10_000})
    measured = measure_level(target_of(fake), workload_for(fake), ClosedLoop(2), settings)
    assert (measured.completed, measured.failed) == (90, 10)
    (error,) = measured.errors
    assert (error.kind, error.count, error.message) == ("http 500", 10, "every tenth")
    assert measured.latency is not None
    assert measured.latency.samples == 90 and measured.latency.low >= 5  # the fast failures are not in it
    assert measured.goodput_rps == pytest.approx(90 / measured.duration_s)
    assert measured.throughput_rps == pytest.approx(90 / measured.duration_s)


def test_h07_an_error_inside_a_200_is_no_success(fake: FakeServer) -> None:
    fake.answer = lambda number: (200, b'{"error":"overloaded"}' if number % 2 else b"{}")
    records = run_closed(target_of(fake), workload_for(fake), 1, request_count=10)
    assert (records.completed, records.failed) == (5, 5)
    assert [(e.kind, e.message) for e in records.error_kinds] == [("error in a 200 answer", "overloaded")]


def test_h03_unstable_is_reported_with_its_figures(fake: FakeServer) -> None:
    """Every answer is slower than the one before, so no three windows agree within 1 %."""
    fake.latency_s = lambda number: 0.005 + 0.0015 * number
    settings = Settings(interval_s=0.1, stability_percentage=1, max_trials=4)
    measured = measure_level(target_of(fake), workload_for(fake), ClosedLoop(1), settings)
    assert measured.stable is False
    assert len(measured.windows) == 4
    assert measured.latency is not None and measured.completed == measured.latency.samples > 0
    assert any("unstable: the last 3 windows differ by more than 1 % after 4 windows" in w for w in measured.warnings)


def test_stable_ends_after_three_windows(fake: FakeServer) -> None:
    fake.latency_s = lambda number: 0.005
    settings = Settings(interval_s=0.1, stability_percentage=1000, max_trials=10)
    measured = measure_level(target_of(fake), workload_for(fake), ClosedLoop(2), settings)
    assert measured.stable is True and len(measured.windows) == 3


def test_open_loop_counts_the_wait_from_when_a_request_was_due(fake: FakeServer) -> None:
    """One at a time of 20 ms, one due each ms: request n ends 20 (n + 1) ms in, 19 n + 20 ms late."""
    fake.latency_s = lambda number: 0.02
    records = run_open(target_of(fake), workload_for(fake), OpenLoop(1000), request_count=10, max_outstanding=1)
    due = np.sort(records.intended_ns)
    assert np.diff(due).tolist() == [1_000_000] * 9
    assert (records.latency_ms >= 19 * np.arange(10) + 20).all()
    assert (records.send_lag_ms >= 19 * np.arange(10)).all()
    service_ms = (records.done_ns - records.sent_ns) / 1e6
    assert records.latency_ms[-1] > 5 * np.median(service_ms)  # what counting from the send would have hidden


def test_h13_the_rate_that_the_client_reached(fake: FakeServer) -> None:
    """Four at a time of at least 10 ms each are 400/s at most, whatever the machine."""
    fake.latency_s = lambda number: 0.01
    records = run_open(target_of(fake), workload_for(fake), OpenLoop(1000), duration_s=0.3, max_outstanding=4)
    achieved = records.sent_between(records.start_ns, records.end_ns) / records.duration_s
    assert achieved <= 400 * 1.05


def test_h13_a_server_that_falls_behind_is_told_from_a_slow_client(fake: FakeServer) -> None:
    fake.latency_s = lambda number: 3600.0
    settings = Settings(interval_s=0.1, max_trials=1)
    target = target_of(fake, timeout_s=1.0)
    measured = measure_level(target, workload_for(fake), OpenLoop(50), settings)
    assert measured.completed == 0 and measured.latency is None
    assert measured.outstanding >= 4
    assert "no request ended within the window; measure longer" in measured.warnings


def test_h15_every_measurement_names_its_mode(fake: FakeServer) -> None:
    settings = Settings(request_count=3)
    for load, mode in ((ClosedLoop(1), "closed"), (OpenLoop(1000), "open")):
        assert measure_level(target_of(fake), workload_for(fake), load, settings).mode == mode


def test_a_request_that_takes_too_long_is_a_timeout(fake: FakeServer) -> None:
    fake.latency_s = lambda number: 3600.0 if number == 1 else 0.0
    records = run_closed(target_of(fake, timeout_s=0.2), workload_for(fake), 1, request_count=3)
    assert (records.completed, records.failed) == (2, 1)
    assert [error.kind for error in records.error_kinds] == ["timeout"]


def test_a_dropped_connection_is_counted_and_replaced(fake: FakeServer) -> None:
    fake.answer = lambda number: (0, b"") if number == 1 else (200, b"{}")
    records = run_closed(target_of(fake), workload_for(fake), 1, request_count=4)
    assert (records.completed, records.failed) == (3, 1)
    assert [error.kind for error in records.error_kinds] == ["connection"]


@pytest.mark.parametrize("body", [b"", b"{}", b"0\r\n\r\n" * 5, bytes(range(256)) * 1000])
@pytest.mark.parametrize("chunked", [False, True])
def test_answers_of_every_form_are_read_to_their_end(fake: FakeServer, body: bytes, chunked: bool) -> None:
    fake.answer, fake.chunked = (lambda number: (200, body)), chunked
    records = run_closed(target_of(fake), workload_for(fake), 2, request_count=10)
    assert (records.completed, records.failed) == (10, 0)


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_no_server_is_an_error_of_every_request(fake: FakeServer, protocol: str) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        target = Target(f"127.0.0.1:{held.getsockname()[1]}", protocol, 5.0)
        records = run_closed(target, workload_for(fake), 2, request_count=6)
    assert (records.completed, records.failed) == (0, 6)
    assert summarise_latency(records.latency_ms) is None


def test_a_run_leaves_no_thread_behind(fake: FakeServer) -> None:
    run_closed(target_of(fake), workload_for(fake), 2, request_count=4)
    before = threading.active_count()
    measure_level(target_of(fake), workload_for(fake), ClosedLoop(2), Settings(request_count=4))
    assert threading.active_count() == before


@pytest.mark.parametrize(("address", "protocol"), [("127.0.0.1", "http"), ("127.0.0.1:x", "grpc"), ("a:1", "ftp")])
def test_target_that_cannot_be(address: str, protocol: str) -> None:
    with pytest.raises(UsageError):
        Target(address, protocol)


def test_either_a_duration_or_a_count(fake: FakeServer) -> None:
    with pytest.raises(UsageError):
        run_closed(target_of(fake), workload_for(fake), 1)
