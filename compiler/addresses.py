"""Where a server listens: its options, and ports that are free. Binds a port only to see whether it can."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

from compiler.errors import EnvironmentLacks

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class ServerOptions:
    """How to start the server. A port of 0 means any free one."""

    repository: Path
    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 8001
    metrics_port: int = 8002
    ready_timeout_s: float = 120
    extra: tuple[str, ...] = ()


@dataclass(frozen=True)
class Addresses:
    """Where a running server listens."""

    host: str
    http_port: int
    grpc_port: int
    metrics_port: int

    @property
    def http(self) -> str:
        return self._with(self.http_port)

    @property
    def grpc(self) -> str:
        return self._with(self.grpc_port)

    @property
    def metrics(self) -> str:
        return f"http://{self._with(self.metrics_port)}/metrics"

    def _with(self, port: int) -> str:
        return f"[{self.host}]:{port}" if ":" in self.host else f"{self.host}:{port}"


def free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def choose_addresses(options: ServerOptions) -> Addresses:
    """Checks the ports that were asked for and finds free ones where 0 was.

    Raises:
        EnvironmentLacks: a port is taken, or asked for twice.
    """
    ports: dict[str, int] = {}
    for flag in ("http_port", "grpc_port", "metrics_port"):
        wanted = getattr(options, flag)
        if wanted == 0:
            while (port := free_port(options.host)) in ports.values():
                pass
            ports[flag] = port
            continue
        if wanted in ports.values():
            raise EnvironmentLacks(f"port {wanted} is asked for twice", hint="give each protocol a port of its own")
        _require_free(options.host, wanted, flag)
        ports[flag] = wanted
    return Addresses(options.host, **ports)


def check_front_port(options: ServerOptions, port: int) -> None:
    """Refuses a port for the OpenAI API before the models are loaded, which may take minutes.

    Raises:
        EnvironmentLacks: it is taken, or Triton is to listen there.
    """
    if port == 0:
        return
    if port in (options.http_port, options.grpc_port, options.metrics_port):
        raise EnvironmentLacks(f"port {port} is asked for twice", hint="give --openai-port a port of its own")
    _require_free(options.host, port, "openai_port")


def _require_free(host: str, port: int, flag: str) -> None:
    option = "--" + flag.replace("_", "-")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free
        try:
            probe.bind((host, port))
        except OSError as error:
            raise EnvironmentLacks(
                f"port {port} on {host} cannot be used: {error.strerror}",
                hint=f"choose another with {option} (0 takes a free one)",
            ) from None
