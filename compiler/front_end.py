"""Starts, watches and stops the OpenAI front end beside a server, in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, Queue

from compiler.addresses import Addresses
from compiler.errors import EnvironmentLacks
from compiler.processes import die_with_parent

_START_S = 60.0
_POLL_S = 0.1
_STOP_S = 15.0  # longer than it lets running requests go on


@dataclass
class FrontEnd:
    """A running front end; a context manager that stops it.

    Args:
        repository: what the server serves.
        addresses: where the server listens.
        host, port: where to listen; port 0 takes a free one.
        api_key: what clients must send; passed on by the environment, since arguments can be seen by everyone.
        check: called again and again while it starts; what it raises ends the start.
    """

    repository: Path
    addresses: Addresses
    host: str
    port: int
    api_key: str = field(default="", repr=False)
    check: Callable[[], None] = lambda: None
    url: str = field(init=False, default="")
    _process: subprocess.Popen[str] | None = field(init=False, default=None)

    def __enter__(self) -> FrontEnd:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def start(self) -> None:
        """Starts it and returns when it accepts connections.

        Raises:
            EnvironmentLacks: it ended, or does not come up.
        """
        environment = {k: v for k, v in os.environ.items() if k != "MODELKILN_API_KEY"}
        if self.api_key:
            environment["MODELKILN_API_KEY"] = self.api_key
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "compiler.cli", "openai", "--json"),
                *("--triton", self.addresses.grpc, "--triton-metrics", self.addresses.metrics),
                *("-r", str(self.repository), "--host", self.host, "--port", str(self.port)),
            ],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C reaches us alone; we stop it in order
            preexec_fn=die_with_parent,
        )
        try:
            self.url = self._read_address()
        except BaseException:
            self.stop()
            raise

    def restart(self) -> None:
        """Starts one that has ended again, where it listened before.

        Raises:
            EnvironmentLacks: see `start`.
        """
        self.stop()
        self.port = int(self.url.rpartition(":")[2].split("/")[0])
        self.start()

    def poll(self) -> int | None:
        """Returns its exit code, or None while it runs."""
        return self._process.poll() if self._process else None

    def stop(self) -> None:
        """Stops it; returns when it is gone. Running requests have a moment to end."""
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if process.stdout:
            process.stdout.close()
        self._process = None

    def _read_address(self) -> str:
        assert self._process is not None and self._process.stdout is not None
        lines: Queue[str] = Queue()
        stdout = self._process.stdout
        threading.Thread(target=lambda: lines.put(stdout.readline()), daemon=True).start()
        line, deadline = None, time.monotonic() + _START_S
        while line is None:
            self.check()
            try:
                line = lines.get(timeout=_POLL_S)
            except Empty:
                if time.monotonic() > deadline:
                    raise EnvironmentLacks(f"the OpenAI front end did not start in {_START_S:g} s") from None
        found = json.loads(line) if line.startswith("{") else {}
        if "openai" not in found:
            reason = found.get("error", {}).get("message", "its message is above")
            raise EnvironmentLacks(f"the OpenAI front end did not start: {reason}")
        return str(found["openai"])
