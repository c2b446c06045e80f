"""`compile serve`: starts or says why not in one line, and leaves nothing behind."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import tritonclient.http as http_client

from clients import GrpcClient, HttpClient
from compiler.shared_memory import shared_memory_prefix
from compiler.triton_install import HOME_VARIABLE, find_triton
from tests.serving import (
    COMPILE,
    FREE_PORTS,
    PYTHON_CONFIG,
    environment,
    processes_in_session,
    run_compile,
    serve,
    write_python_model,
)


def _echo(url: str, model: str = "echo") -> None:
    value = np.array([[1.5, -2.5]], dtype=np.float32)
    with http_client.InferenceServerClient(url) as client:
        tensor = http_client.InferInput("x", [1, 2], "FP32")
        tensor.set_data_from_numpy(value)
        assert np.array_equal(client.infer(model, [tensor]).as_numpy("y"), value)


def _gone(session: int, pid: int) -> bool:
    """Waits until no process of the session and no shared memory of `pid` is left."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if not processes_in_session(session) and not list(Path("/dev/shm").glob(shared_memory_prefix(pid) + "*")):
            return True
        time.sleep(0.05)
    return False


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    write_python_model(tmp_path / "repo", "echo")
    return tmp_path / "repo"


def test_a_proxy_of_the_environment_is_not_asked_for_the_own_machine(repository):
    """The server would never be found ready; port 1 answers nobody."""
    with serve(repository, http_proxy="http://127.0.0.1:1", no_proxy="") as server:
        _echo(server.http)


def test_what_the_openai_api_lacks_is_told_before_models_are_loaded(repository, tmp_path):
    (tmp_path / "key").write_text("")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        wrong = {
            ("--openai-port", str(port)): (3, f"port {port} on 127.0.0.1 cannot be used", "--openai-port (0 takes"),
            ("--openai-port", "8123", "--http-port", "8123"): (3, "port 8123 is asked for twice", "--openai-port"),
            ("--openai-port", "0", "--openai-api-key-file", str(tmp_path / "key")): (2, "has 0 characters", "leave it"),
        }
        for options, (code, message, hint) in wrong.items():
            result = run_compile("serve", repository, *FREE_PORTS, *options)
            assert result.returncode == code, result.stderr
            assert message in result.stderr and hint in result.stderr
            assert "triton:" not in result.stderr  # no server, which would say that it was stopped


def _has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.skipif(not _has_ipv6(), reason="this machine has no ::1")
def test_a_server_may_listen_on_ipv6(repository):
    with serve(repository, "--host", "::1") as server:
        assert all("[::1]:" in address for address in (server.http, server.grpc, server.metrics))
        for client_type, address in ((HttpClient, server.http), (GrpcClient, server.grpc)):
            with client_type(address) as client:
                assert client.infer("echo", {"x": [[1.5, -2.5]]})["y"].tolist() == [[1.5, -2.5]]
        with urllib.request.urlopen(server.metrics, timeout=60) as answer:
            assert b"nv_inference_request_success" in answer.read()


def test_metrics_of_triton_need_a_url(repository):
    result = run_compile("openai", "-r", repository, "--port", "0", "--triton-metrics", "127.0.0.1:8002")
    assert result.returncode == 2
    assert "--triton-metrics is '127.0.0.1:8002'; allowed: a URL such as http://" in result.stderr


@pytest.mark.parametrize("address", ["127.0.0.1", "https://127.0.0.1:8001", "127.0.0.1:8001/v2"])
def test_an_address_of_triton_that_is_none_is_wrong_usage(repository, address):
    result = run_compile("openai", "--triton", address, "-r", repository, "--port", "0")
    assert result.returncode == 2
    assert result.stderr.startswith(f"error: --triton: the address {address!r} ") and "Traceback" not in result.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_the_server_and_all_it_started(repository, number):
    with serve(repository) as server:
        _echo(server.http)
        assert len(processes_in_session(server.triton_pid)) >= 2  # the server and its stub
        server.process.send_signal(number)
        _, stderr = server.process.communicate(timeout=60)
        assert server.process.returncode == 0 and stderr.endswith("stopped\n")
        assert processes_in_session(server.triton_pid) == []
        assert list(Path("/dev/shm").glob(shared_memory_prefix(server.process.pid) + "*")) == []


def test_a_killed_serve_takes_the_server_with_it(repository):
    with serve(repository) as server:
        server.process.kill()
        server.process.wait()
        deadline = time.monotonic() + 30
        while processes_in_session(server.triton_pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert processes_in_session(server.triton_pid) == []
        pid = server.process.pid
    # What the killed one left in /dev/shm is removed by the next start.
    with serve(repository) as server:
        assert list(Path("/dev/shm").glob(shared_memory_prefix(pid) + "*")) == []


def test_a_signal_while_models_load_stops_everything(tmp_path):
    slow = "import time\ntime.sleep(600)\n"
    write_python_model(tmp_path / "repo", "slow", code=slow)
    command = [*COMPILE, "serve", str(tmp_path / "repo"), *FREE_PORTS, "--verbose"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())
    assert process.stderr is not None
    for line in process.stderr:
        if "loading: slow" in line:
            break
    session = next(p for p in _children(process.pid))
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=90)
    assert process.returncode == 0
    assert _gone(session, process.pid)


def _children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_port_in_use_is_named(repository):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run_compile("serve", repository, "--http-port", port, "--grpc-port", 0, "--metrics-port", 0)
    assert done.returncode == 3
    assert done.stderr == (
        f"error: port {port} on 127.0.0.1 cannot be used: Address already in use\n"
        "  hint: choose another with --http-port (0 takes a free one)\n"
    )


def test_the_same_port_twice_is_refused(repository):
    done = run_compile("serve", repository, "--http-port", 18999, "--grpc-port", 18999)
    assert done.returncode == 3 and "port 18999 is asked for twice" in done.stderr


def test_a_model_that_fails_to_load_is_named_with_the_reason(repository):
    write_python_model(repository, "broken", code="import no_such_module\n")
    done = run_compile("serve", repository, *FREE_PORTS)
    assert done.returncode == 1
    expected = (
        "error: model 'broken' version 1 failed to load: "
        "ModuleNotFoundError: No module named 'no_such_module' (at broken/1/model.py:1)"
    )
    assert expected in done.stderr.splitlines()
    assert "Traceback" not in done.stderr


def test_an_ensemble_is_not_blamed_for_its_member(repository):
    write_python_model(repository, "broken", code="raise ValueError('no weights here')\n")
    folder = repository / "pipe"
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(
        'platform: "ensemble" max_batch_size: 4 '
        'input { name: "x" data_type: TYPE_FP32 dims: [-1] } output { name: "y" data_type: TYPE_FP32 dims: [-1] } '
        'ensemble_scheduling { step { model_name: "broken" model_version: -1 '
        'input_map { key: "x" value: "x" } output_map { key: "y" value: "y" } } }'
    )
    done = run_compile("serve", repository, *FREE_PORTS)
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: model")]
    assert done.returncode == 1
    assert lines == [
        "error: model 'broken' version 1 failed to load: ValueError: no weights here (at broken/1/model.py:1)"
    ]


def test_a_load_that_never_ends_is_given_up_by_name(tmp_path):
    write_python_model(tmp_path / "repo", "slow", code="import time\ntime.sleep(600)\n")
    done = run_compile("serve", tmp_path / "repo", *FREE_PORTS, "--ready-timeout", 3)
    assert done.returncode == 3 and "not ready after 3 s; still loading: slow" in done.stderr


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda r: (r / "echo" / "1" / "model.py").unlink(), "echo: version 1 has no model.py"),
        (lambda r: shutil.rmtree(r / "echo" / "1"), "echo: there is no version folder"),
        (lambda r: (r / "echo" / "config.pbtxt").unlink(), "echo: config.pbtxt is missing"),
        (lambda r: write_python_model(r, "a b"), "the folder's name is not one that Triton can load: 'a b'"),
        (
            lambda r: (r / "echo" / "config.pbtxt").write_text('name: "other"\n' + PYTHON_CONFIG),
            'config.pbtxt says name: "other"; it must be "echo"',  # c23
        ),
        (
            lambda r: (r / "echo" / "config.pbtxt").write_text("backend: ${backend}\n"),  # c22
            "not a valid config: echo/config.pbtxt:1:10",
        ),
        (
            lambda r: (r / "echo" / "config.pbtxt").write_text(PYTHON_CONFIG.replace("KIND_CPU", "KIND_GPU")),  # c15
            "instance_group asks for KIND_GPU, and this machine has no GPU",
        ),
        (
            lambda r: (r / "echo" / "config.pbtxt").write_text(
                PYTHON_CONFIG + "dynamic_batching { preferred_batch_size: [8] }"  # c06
            ),
            "preferred_batch_size 8 is above max_batch_size 4",
        ),
    ],
)
def test_what_would_hang_or_fail_is_refused_before_the_server_starts(repository, damage, message):
    """Without model.py, and with a space in a name, the bundled server hangs for ever."""
    damage(repository)
    for command in ("check", "serve"):
        done = run_compile(command, repository)
        assert done.returncode == 1
        assert message in done.stdout + done.stderr


def test_a_path_with_a_space_is_served(tmp_path):
    """The bundled server's stub aborts on such a path; it is given another."""
    write_python_model(tmp_path / "my models" / "repo é", "echo")
    with serve(tmp_path / "my models" / "repo é") as server:
        _echo(server.http)


def test_a_repository_that_does_not_exist(tmp_path):
    done = run_compile("serve", tmp_path / "nothing")
    assert done.returncode == 1 and "nothing does not exist" in done.stderr


@pytest.fixture(scope="module")
def numpy_2(tmp_path_factory) -> str:
    """A real numpy 2, in front of the one that is installed."""
    folder = tmp_path_factory.mktemp("numpy2")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), "numpy==2.2.6"]
    subprocess.run(command, check=True, capture_output=True)
    return str(folder)


def test_numpy_2_is_refused_by_serve_and_shown_by_doctor(repository, numpy_2):
    command = [*COMPILE, "serve", str(repository), *FREE_PORTS]
    env = environment()
    env["PYTHONPATH"] = f"{numpy_2}:{env['PYTHONPATH']}"
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=env)
    assert done.returncode == 3
    assert "numpy is 2.2.6: Triton's Python backend answers empty or misshapen outputs under numpy 2" in done.stderr
    assert "hint: pip install 'numpy==1.26.4'" in done.stderr
    doctor = subprocess.run([*COMPILE, "doctor", "--json"], capture_output=True, text=True, check=False, env=env)
    assert doctor.returncode == 3
    checks = {c["name"]: c for c in json.loads(doctor.stdout)["checks"]}
    assert checks["numpy"]["status"] == "fault" and checks["numpy"]["found"] == "2.2.6"


def test_f12_a_stub_for_another_python_is_refused_and_shown_by_doctor(repository, tmp_path):
    install = find_triton()
    home = tmp_path / "triton"
    shutil.copytree(install.home, home, symlinks=True, ignore=shutil.ignore_patterns("python_backend_stubs"))
    (home / "python_backend_stubs" / "3.8").mkdir(parents=True)
    shutil.copy(
        install.home / "python_backend_stubs" / "3.8" / "triton_python_backend_stub",
        home / "python_backend_stubs" / "3.8",
    )
    extra = {HOME_VARIABLE: str(home)}
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    done = run_compile("serve", repository, *FREE_PORTS, **extra)
    assert done.returncode == 3
    assert f"has Python stubs for 3.8, and this interpreter is Python {version}" in done.stderr
    doctor = run_compile("doctor", "--json", **extra)
    assert doctor.returncode == 3
    stub = next(c for c in json.loads(doctor.stdout)["checks"] if c["name"] == "python stub")
    assert stub["status"] == "fault" and stub["found"] == f"for Python 3.8; this is Python {version}"


def test_doctor_is_content_here_and_counts_shared_memory(repository):
    done = run_compile("doctor", "-r", repository, "--json")
    assert done.returncode == 0, done.stdout
    checks = {c["name"]: c for c in json.loads(done.stdout)["checks"]}
    assert checks["tritonserver"]["found"].startswith("2.") and checks["tritonserver"]["found"].endswith("starts")
    assert "1 instances need 1 MiB" in checks["/dev/shm"]["found"]
    assert not [c for c in checks.values() if c["status"] == "fault"]


def test_a_home_without_a_server_is_named(repository, tmp_path):
    done = run_compile("serve", repository, **{HOME_VARIABLE: str(tmp_path)})
    assert done.returncode == 3 and f"{HOME_VARIABLE} is {tmp_path}, which holds no bin/tritonserver" in done.stderr


def test_admin_routes_are_closed_on_a_public_address(repository):
    """Everything on 0.0.0.0 still answers on loopback, so that is where this test looks."""
    with serve(repository, "--host", "0.0.0.0") as server:
        port = server.http.rpartition(":")[2]
        _echo(f"127.0.0.1:{port}")
        with http_client.InferenceServerClient(f"127.0.0.1:{port}") as client:
            for call in (client.get_system_shared_memory_status, client.get_log_settings, client.get_trace_settings):
                with pytest.raises(Exception, match=r"restricted|403"):
                    call()


def test_loopback_is_the_default(repository):
    with serve(repository) as server:
        for address in (server.http, server.grpc):
            assert address.startswith("127.0.0.1:")
        listening = Path(f"/proc/{server.triton_pid}/net/tcp").read_text()
        port = f"{int(server.http.rpartition(':')[2]):04X}"
        assert f"0100007F:{port}" in listening and f"00000000:{port}" not in listening
