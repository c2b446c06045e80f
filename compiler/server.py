"""Starts, watches and stops a real tritonserver on a repository; leaves no process and no shared memory behind."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from compiler.addresses import Addresses, ServerOptions, choose_addresses
from compiler.complete_configs import configs_are_complete
from compiler.errors import EnvironmentLacks, RepositoryError
from compiler.model_control import ModelControl
from compiler.processes import die_with_parent, kill_group, signals_deferred
from compiler.repository import Repository
from compiler.server_flags import EXIT_TIMEOUT_S, hide_from_process_list, new_admin_key, server_flags
from compiler.server_log import LoadFailure, ServerLog
from compiler.shared_memory import remove_shared_memory, remove_stale_shared_memory
from compiler.triton_install import (
    TritonInstall,
    compile_python_files,
    find_triton,
    lay_out_backends,
    server_environment,
)

_KILL_AFTER_S = EXIT_TIMEOUT_S + 5
_POLL_S = 0.05


@dataclass
class TritonServer:
    """A running server; a context manager that stops it.

    Args:
        options: what to serve and where.
        relay: called with each line of the server's log.
        check: called again and again while the server starts; what it raises ends the start.
    """

    options: ServerOptions
    relay: Callable[[str], None] = lambda line: None
    check: Callable[[], None] = lambda: None
    addresses: Addresses = field(init=False)
    log: ServerLog = field(init=False, default_factory=ServerLog)
    _process: subprocess.Popen[str] | None = field(init=False, default=None)
    _folder: Path | None = field(init=False, default=None)
    _reader: threading.Thread | None = field(init=False, default=None)
    _tail: deque[str] = field(init=False, default_factory=lambda: deque(maxlen=50))
    _started_at: float = field(init=False, default=0.0)
    _key: str = field(init=False, default_factory=new_admin_key)

    def __enter__(self) -> TritonServer:
        self.start()
        try:
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Starts the process; returns before the models are loaded.

        Raises:
            EnvironmentLacks: no server, no stub for this Python, numpy 2, or a port that is taken.
        """
        require_numpy_1()
        install = find_triton()
        self.addresses = choose_addresses(self.options)
        remove_stale_shared_memory()
        # Short and plain: the stub aborts on a path with a space, so the server never sees the user's path.
        self._folder = Path(tempfile.mkdtemp(prefix="modelkiln-serve-"))
        try:
            (self._folder / "backends").mkdir()
            lay_out_backends(install, self._folder / "backends")
            compile_python_files(self.options.repository)
            (self._folder / "repository").symlink_to(self.options.repository.resolve())
            self._launch(install)
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise

    def _launch(self, install: TritonInstall) -> None:
        assert self._folder is not None
        complete = configs_are_complete(Repository(self.options.repository))
        command = [str(install.binary), *server_flags(self.options, self.addresses, self._folder, self._key, complete)]
        self._started_at = time.monotonic()
        self._process = subprocess.Popen(
            command,
            env=server_environment(install),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C reaches us alone; we stop the server in order
            preexec_fn=die_with_parent,
        )
        self._reader = threading.Thread(target=self._read_log, name="triton-log", daemon=True)
        self._reader.start()

    def restart(self) -> None:
        """Starts a server that ended by itself again, on the same addresses, and waits until its models are READY.

        Raises:
            RepositoryError, EnvironmentLacks: see `wait_ready`; what was started is ended.
        """
        self._end()
        self.log = ServerLog()
        self._tail.clear()
        self._launch(find_triton())
        try:
            self.wait_ready()
        except BaseException:
            self._end()
            raise

    @property
    def control(self) -> ModelControl:
        """What loads and unloads the models of this server."""
        return ModelControl(self.addresses.grpc, self._key, self.options.ready_timeout_s)

    def wait_ready(self) -> list[str]:
        """Waits until every model is READY and returns their names.

        Raises:
            RepositoryError: a model failed to load; one line per model says why.
            EnvironmentLacks: the server stopped by itself, or did not become ready in time.
        """
        assert self._process is not None
        deadline = time.monotonic() + self.options.ready_timeout_s
        while time.monotonic() < deadline:
            self.check()
            if self._process.poll() is not None:
                self._join_reader()
                raise self._startup_error()
            if _http_status(f"http://{self.addresses.http}/v2/health/ready") == 200:
                return sorted(self.log.loaded)
            time.sleep(_POLL_S)
        waiting = ", ".join(sorted(self.log.loading - self.log.loaded)) or "the server itself"
        raise EnvironmentLacks(
            f"not ready after {self.options.ready_timeout_s:g} s; still loading: {waiting}",
            hint="give it longer with --ready-timeout, or see the server's log with --verbose",
        )

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Waits for the server to end by itself; returns its exit code, or None after the timeout."""
        assert self._process is not None
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def stop(self) -> None:
        """Stops the server and everything it started; returns when all of it is gone."""
        if self._process is None:
            return
        # A second Ctrl-C must not leave the server running.
        with signals_deferred():
            self._end()
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)
            self._process = None

    def _end(self) -> None:
        """Ends the process where it still runs, its stubs, and what they shared."""
        process = self._process
        assert process is not None
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(_KILL_AFTER_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        kill_group(process.pid)
        self._join_reader()
        if process.stdout:
            process.stdout.close()
        remove_shared_memory(os.getpid())

    def _read_log(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        hidden = False
        with contextlib.suppress(ValueError):  # closed while reading, at stop
            for line in self._process.stdout:
                if not hidden:  # who writes a log has read its arguments
                    hidden = True
                    self._hide_key(self._process.pid)
                self._tail.append(line.rstrip("\n"))
                self.log.read(line, time.monotonic() - self._started_at)
                self.relay(line.rstrip("\n"))

    def _hide_key(self, pid: int) -> None:
        if not hide_from_process_list(pid, self._key):
            self.relay("warning: the key of the admin routes stays in the process list: other users here can read it")

    def _join_reader(self) -> None:
        if self._reader is not None:
            self._reader.join(timeout=5)

    def _startup_error(self) -> EnvironmentLacks | RepositoryError:
        failures = self.log.failures
        if failures:
            return RepositoryError("\n".join(_failure_line(f, self._folder) for f in failures))
        last = next((line for line in reversed(self._tail) if line.startswith(("error:", "E"))), "")
        code = self._process.returncode if self._process else None
        return EnvironmentLacks(
            f"tritonserver ended with code {code} before it was ready: {last or 'no message'}",
            hint="see the server's log with --verbose",
        )


def require_numpy_1() -> None:
    """Refuses numpy 2, under which Triton's Python backend answers with empty or misshapen outputs."""
    import numpy

    if int(numpy.__version__.split(".")[0]) >= 2:
        raise EnvironmentLacks(
            f"numpy is {numpy.__version__}: Triton's Python backend answers empty or misshapen outputs under numpy 2",
            hint="pip install 'numpy==1.26.4'",
        )


def _failure_line(failure: LoadFailure, folder: Path | None) -> str:
    reason = failure.reason.replace(f"{folder}/repository/", "") if folder else failure.reason
    version = f" version {failure.version}" if failure.version else ""
    return f"model '{failure.model}'{version} failed to load: {reason}"


# The environment's proxy is for the world outside: it cannot reach a server on this machine's loopback.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _http_status(url: str) -> int | None:
    try:
        with _DIRECT.open(url, timeout=2) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None


def server_version(addresses: Addresses) -> str:
    """Asks a running server for its version."""
    with _DIRECT.open(f"http://{addresses.http}/v2", timeout=5) as response:
        return str(json.load(response)["version"])
