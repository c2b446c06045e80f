"""Where a measurement ran: what a reader must know before comparing it with another."""

from __future__ import annotations

import os
import platform
import socket
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path


@dataclass(frozen=True)
class Environment:
    """The client's machine.

    Attributes:
        cores: that this process may use.
        same_host: client and server share one machine, and so its cores.
    """

    host: str
    cpu: str
    cores: int
    system: str
    python: str
    grpcio: str | None
    same_host: bool


def describe_environment(address: str) -> Environment:
    """This machine, as the client of the server at `address` (`host:port`)."""
    return Environment(
        host=socket.gethostname(),
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        grpcio=_version("grpcio"),
        same_host=is_this_host(address.rpartition(":")[0]),
    )


def is_this_host(host: str) -> bool:
    """True when `host` resolves to an address that this machine can bind, which only its own can be."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), 0, type=socket.SOCK_STREAM)
    except OSError:
        return False
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.bind((address[0], 0))
            except OSError:
                continue
            return True
    return False


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
