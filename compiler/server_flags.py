"""The command line of tritonserver, and the key of its admin routes: made here, told to nobody, taken out of sight."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from compiler.addresses import LOOPBACK, Addresses, ServerOptions
from compiler.shared_memory import shared_memory_prefix

# How long the server waits for running requests when it is told to stop.
EXIT_TIMEOUT_S = 10
_CONTROL_MODE = "--model-control-mode"
# Whoever may load models may run code of theirs.
_NEVER_OPEN = ("model-repository",)
_OPEN_ON_LOOPBACK = ("shared-memory", "trace", "logging")
_ARGUMENTS_START, _ARGUMENTS_END = 45, 46  # of /proc/PID/stat, counted behind the process's name


def new_admin_key() -> str:
    return secrets.token_urlsafe(24)


def loads_are_ours(options: ServerOptions) -> bool:
    """Returns whether models are loaded and unloaded by us, as supervision needs; not where a flag says otherwise."""
    return not any(flag.startswith(_CONTROL_MODE) for flag in options.extra)


def server_flags(options: ServerOptions, addresses: Addresses, folder: Path, key: str, complete: bool) -> list[str]:
    """Returns the arguments for a server.

    Args:
        folder: where its repository and backends are laid out.
        key: what opens the admin routes.
        complete: whether no config.pbtxt needs to be completed: that would start a second process for each model.
    """
    # Each of Triton's two servers has a form of its own for IPv6: libevhtp a prefix, gRPC brackets.
    http_host, grpc_host = (f"ipv6:{options.host}", f"[{options.host}]") if ":" in options.host else (options.host,) * 2
    flags = [
        f"--model-repository={folder / 'repository'}",
        f"--backend-directory={folder / 'backends'}",
        f"--http-address={http_host}",
        f"--grpc-address={grpc_host}",
        f"--metrics-address={http_host}",
        f"--http-port={addresses.http_port}",
        f"--grpc-port={addresses.grpc_port}",
        f"--metrics-port={addresses.metrics_port}",
        f"--exit-timeout-secs={EXIT_TIMEOUT_S}",
        f"--backend-config=python,shm-region-prefix-name={shared_memory_prefix(os.getpid())}",
    ]
    if complete:
        flags.append("--disable-auto-complete-config")
    if loads_are_ours(options):
        flags += [f"{_CONTROL_MODE}=explicit", "--load-model=*"]
    for route in _NEVER_OPEN if options.host in LOOPBACK else _NEVER_OPEN + _OPEN_ON_LOOPBACK:
        flags += [
            f"--http-restricted-api={route}:admin-key={key}",
            f"--grpc-restricted-protocol={route}:admin-key={key}",
        ]
    return [*flags, *options.extra]


def hide_from_process_list(pid: int, secret: str) -> bool:
    """Overwrites a secret in the arguments of a child, which every user of the machine can read in /proc.

    Returns:
        Whether it is gone; a hardened kernel may not allow it.
    """
    hidden = secret.encode()
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        start, end = int(fields[_ARGUMENTS_START]), int(fields[_ARGUMENTS_END])
        with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
            memory.seek(start)
            arguments = memory.read(end - start)
            memory.seek(start)
            memory.write(arguments.replace(hidden, b"*" * len(hidden)))
        return hidden not in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
