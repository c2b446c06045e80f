"""The command: what goes to which stream, and the exit code."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from perf.arrivals import ClosedLoop, OpenLoop
from perf.cli import main
from perf.json_form import to_json
from perf.report import from_json
from tests.perf.builders import report_of
from tests.perf.fake_server import FakeServer, run_fake_server
from tests.triton_models import TritonAddress

QUICK = ("--request-count", "20")


def perf_report(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def run(fake: FakeServer, folder: Path, *more: object) -> Result:
    return perf_report("run", "-m", "fake", "-i", "http", "-u", fake.address, "--output-dir", folder, *more)


def test_result_on_stdout_and_progress_on_stderr(fake: FakeServer, tmp_path: Path) -> None:
    result = run(fake, tmp_path, *QUICK, "--concurrency-range", "1:4:x2")
    assert result.exit_code == 0, result.output
    assert "fake version 1 over http" in result.stdout and "closed loop" in result.stdout
    assert "\x1b" not in result.stdout
    assert "concurrency 4" in result.stderr and f"report: {tmp_path / 'report.html'}" in result.stderr
    report = from_json((tmp_path / "report.json").read_text(), "report.json")
    assert [level.value for level in report.levels] == [1, 2, 4]
    assert len((tmp_path / "report.csv").read_text().splitlines()) == 4
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")


def test_json_is_the_only_thing_on_stdout(fake: FakeServer, tmp_path: Path) -> None:
    result = run(fake, tmp_path, *QUICK, "--json", "--goodput", "request_latency:60000", "--repeats", "2")
    assert result.exit_code == 0
    report = from_json(result.stdout, "stdout")
    assert [one.completed for one in report.levels[0].measurements] == [20, 20]
    one = report.levels[0].measurements[0]
    assert one.goodput_rps == one.throughput_rps


def test_open_loop_from_the_command_line(fake: FakeServer, tmp_path: Path) -> None:
    options = (
        "--request-rate-range",
        "200:400:200",
        "--request-distribution",
        "gamma",
        "--burstiness",
        "0.5",
    )
    result = run(fake, tmp_path, *QUICK, *options, "-f", tmp_path / "latency.csv")
    assert result.exit_code == 0
    assert "open loop" in result.stdout and "sent req/s" in result.stdout
    assert (tmp_path / "latency.csv").read_text().startswith("Request Rate,Inferences/Second,")


def test_h03_unstable_ends_with_1_and_keeps_the_report(fake: FakeServer, tmp_path: Path) -> None:
    fake.latency_s = lambda number: 0.005 + 0.0015 * number
    result = run(fake, tmp_path, "-p", "100", "-s", "1", "-r", "3")
    assert result.exit_code == 1
    assert "unstable" in result.stdout and "NO" in result.stdout
    assert (tmp_path / "report.json").exists()


def test_h03_a_single_trial_reports(fake: FakeServer, tmp_path: Path) -> None:
    result = run(fake, tmp_path, "-p", "100", "-r", "1")
    assert result.exit_code == 0
    assert "not judged" in result.stdout


def test_every_request_failed_ends_with_1_and_keeps_the_report(fake: FakeServer, tmp_path: Path) -> None:
    fake.answer = lambda number: (500, b'{"error":"no"}')
    result = run(fake, tmp_path, *QUICK)
    assert result.exit_code == 1
    assert "every request failed" in result.stdout and "20 x http 500: no" in result.stdout
    assert (tmp_path / "report.html").exists()


def test_a_server_that_dies_under_load_leaves_a_report(tmp_path: Path) -> None:
    with run_fake_server() as fake:

        def die_at_the_tenth(number: int) -> tuple[int, bytes]:
            if number == 9:
                fake.stop_listening()
            return (0 if number >= 9 else 200), b"{}"

        fake.answer = die_at_the_tenth
        result = run(fake, tmp_path, *QUICK, "--json")
    (one,) = from_json(result.stdout, "stdout").levels[0].measurements
    assert (one.completed, one.failed) == (9, 11)
    assert [error.kind for error in one.errors] == ["connection"]
    assert result.exit_code == 0


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (("-m", "nope"), "no model 'nope' at {address}; its models: fake, other"),
        (("-x", "9"), "model 'fake' has no version '9'"),
        (("-b", "9"), "batch size is 9; model 'fake' takes 1 to 8"),
        (("--concurrency-range", "4:1"), "range '4:1'"),
        (("--concurrency-range", "1", "--request-rate-range", "1"), "give one of them"),
        (("--shape", "INPUT0"), "NAME:D1,D2"),
        (("--shape", "INPUT0:x"), "NAME:D1,D2"),
        (("--shape", "INPUT0:5"), "does not fit [4]"),
        (("--shape", "NOPE:4"), "no input 'NOPE'; valid inputs: INPUT0 (FP32 [-1, 4])"),
        (("--input-data", "/nope.json"), "No such file"),
        (("--goodput", "ttft:5"), "allowed: request_latency"),
        (("-u", "127.0.0.1"), "'127.0.0.1' is not allowed; allowed: host:port"),
        (("-u", "https://127.0.0.1:8001"), "has the scheme 'https'"),
        (("-s", "nan"), "'nan' is not a finite number"),
        (("-i", "ftp"), "'grpc', 'http'"),
        (("--output-dir", "/proc/nope"), "--output-dir /proc/nope"),
    ],
)
def test_wrong_usage_ends_with_2_and_says_what_is_allowed(
    fake: FakeServer, tmp_path: Path, options: tuple[str, ...], part: str
) -> None:
    result = run(fake, tmp_path, *options)
    assert result.exit_code == 2
    assert part.format(address=fake.address) in result.stderr
    assert result.stdout == "" and "Traceback" not in result.stderr
    assert fake.requests == []


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_no_server_ends_with_3_in_one_line(tmp_path: Path, protocol: str) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{held.getsockname()[1]}"
        result = perf_report("run", "-m", "m", "-i", protocol, "-u", address, "--output-dir", tmp_path)
    assert result.exit_code == 3
    assert len(result.stderr.splitlines()) == 1
    assert address in result.stderr and "compile serve" in result.stderr


def test_debug_shows_the_trace() -> None:
    result = perf_report("--debug", "show", "/nope.json")
    assert result.exception is not None and "cannot read /nope.json" in str(result.exception)


def test_show_prints_a_report_again(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(to_json(report_of([ClosedLoop(1)], [[1.0] * 9])))
    assert "concurrency 1: 27 completed / 3.000 s" in perf_report("show", path).stdout
    assert perf_report("show", path, "--json").stdout == path.read_text()
    assert perf_report("show", tmp_path / "nope.json").exit_code == 2


def test_h15_compare_refuses_two_modes(tmp_path: Path) -> None:
    closed, opened = tmp_path / "closed.json", tmp_path / "open.json"
    closed.write_text(to_json(report_of([ClosedLoop(1)], [[1.0] * 9])))
    opened.write_text(to_json(report_of([OpenLoop(9)], [[1.0] * 9])))
    result = perf_report("compare", closed, opened)
    assert result.exit_code == 2 and "closed loop with an open loop" in result.stderr


def test_h04_compare_says_when_intervals_overlap(tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text(to_json(report_of([ClosedLoop(1)], [[1.0] * 10, [3.0] * 12])))
    new.write_text(to_json(report_of([ClosedLoop(1)], [[3.0] * 30, [5.0] * 36])))
    lines = perf_report("compare", old, new).stdout.splitlines()
    assert re.search(r"requests/s +11\.0 \[10\.0, 12\.0\] +33\.0 \[30\.0, 36\.0\] +3\.00x +intervals apart", lines[1])
    assert re.search(r"p50 ms .*2\.00x +intervals overlap", lines[2])
    document = json.loads(perf_report("compare", old, new, "--json").stdout)
    assert document["changes"][0]["ratio"] == 3.0


@pytest.mark.parametrize("command", [(), ("run",), ("show",), ("compare",)])
def test_help_is_there_without_a_server(command: tuple[str, ...]) -> None:
    result = perf_report(*command, "--help")
    assert result.exit_code == 0
    assert all(len(line) <= 100 for line in result.stdout.splitlines())
    if command == ("run",):
        assert "Examples:" in result.stdout and "1:16:x4" in result.stdout


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_c07_real_server_reports_its_batches(triton: TritonAddress, tmp_path: Path, protocol: str) -> None:
    address = triton.grpc_url if protocol == "grpc" else triton.http_url
    options = ("-i", protocol, "-u", address, "--output-dir", tmp_path, "--concurrency-range", "8")
    result = perf_report("run", "-m", "echo", *options, "--request-count", "400", "--json")
    assert result.exit_code == 0, result.stderr
    report = from_json(result.stdout, "stdout")
    (one,) = report.levels[0].measurements
    assert (one.completed, one.failed) == (400, 0)
    (echo,) = one.server
    assert (echo.model, echo.inferences) == ("echo", 400)
    assert sum(int(size) * count for size, count in echo.batches.items()) == 400
    assert sum(echo.batches.values()) == echo.executions
    assert set(echo.phase_us) == {"queue", "compute_input", "compute_infer", "compute_output"}
    assert report.subject.server == "triton 2.51.0"


def test_c07_a_batch_of_the_client_is_a_batch_of_the_server(triton: TritonAddress, tmp_path: Path) -> None:
    options = ("-u", triton.grpc_url, "--output-dir", tmp_path, "-b", "8", "--request-count", "10", "--json")
    (one,) = from_json(perf_report("run", "-m", "sleep_5ms", *options).stdout, "x").levels[0].measurements
    assert one.server[0].batches == {"8": 10}
    assert one.inferences_rps == pytest.approx(8 * one.throughput_rps)


def test_d08_an_ensemble_shows_wall_time_beside_its_counters(triton: TritonAddress, tmp_path: Path) -> None:
    options = ("-u", triton.grpc_url, "--output-dir", tmp_path, "--request-count", "4", "--json")
    report = from_json(perf_report("run", "-m", "parallel", *options).stdout, "x")
    (one,) = report.levels[0].measurements
    activity = {model.model: model for model in one.server}
    assert activity["parallel"].is_ensemble and not activity["sleep_50ms"].is_ensemble
    assert activity["sleep_50ms"].inferences == 8  # two steps for each request
    summed_ms = activity["parallel"].phase_us["compute_infer"] / 1e3
    assert summed_ms >= 100  # two sleeps of 50 ms ...
    assert one.latency is not None and 50 <= one.latency.low < summed_ms  # ... at the same time
    assert "sums over the steps, not wall time" in perf_report("show", tmp_path / "report.json").stdout


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_h07_real_failures_are_counted(triton: TritonAddress, tmp_path: Path, protocol: str) -> None:
    address = triton.grpc_url if protocol == "grpc" else triton.http_url
    options = ("-i", protocol, "-u", address, "--output-dir", tmp_path, "--request-count", "50", "--json")
    (one,) = from_json(perf_report("run", "-m", "flaky", *options).stdout, "x").levels[0].measurements
    assert (one.completed, one.failed) == (45, 5)
    assert [error.message for error in one.errors] == ["every 10th request fails"]


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_c18_strings_reach_the_real_server(triton: TritonAddress, tmp_path: Path, protocol: str) -> None:
    address = triton.grpc_url if protocol == "grpc" else triton.http_url
    data = tmp_path / "inputs.json"
    data.write_text(json.dumps({"data": [{"TEXT": ["a", "", "é"]}, {"TEXT": ["x\x00", "y", "z"]}]}))
    options = ("-i", protocol, "-u", address, "--output-dir", tmp_path, "-b", "2", "--request-count", "10")
    result = perf_report("run", "-m", "echo_text", *options, "--input-data", data, "--json")
    (one,) = from_json(result.stdout, "x").levels[0].measurements
    assert (one.completed, one.failed) == (10, 0)


def test_ctrl_c_ends_a_run_at_once_without_a_trace(fake: FakeServer, tmp_path: Path) -> None:
    fake.latency_s = lambda number: 0.01
    options = ["-m", "fake", "-i", "http", "-u", fake.address, "--output-dir", str(tmp_path), "-p", "600000"]
    command = [sys.executable, "-m", "perf.cli", "run", *options]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 30
        while not fake.requests and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode != 0
    assert stdout == "" and "Traceback" not in stderr and "Aborted!" in stderr
