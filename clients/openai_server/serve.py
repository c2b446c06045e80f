"""Running the front end in this process until it is stopped."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from collections.abc import Callable

import uvicorn

from clients.openai_server.app import create_app
from clients.openai_server.protocol import with_limits
from clients.openai_server.settings import Settings
from compiler.errors import EnvironmentLacks

_KEEP_ALIVE_S = 75  # longer than clients keep idle connections: they close first, and no request meets a closing one
# By default gRPC's own threads read its sockets, one hop more for each token: a third of what a token costs here. A
# version that does not know the name any more says so in a line of the log.
GRPC_EXPERIMENTS = "-event_engine_client"
_STOP_S = 10  # how long running requests may go on after SIGTERM


def run(settings: Settings, on_listening: Callable[[str], None] = lambda address: None) -> None:
    """Serves until SIGINT or SIGTERM.

    Args:
        on_listening: called with `host:port` when connections are accepted.

    Raises:
        EnvironmentLacks: the address cannot be used.
    """
    _log_to_stderr()
    os.environ.setdefault("GRPC_EXPERIMENTS", GRPC_EXPERIMENTS)  # read when the first channel is made
    bound = _bound_socket(settings.host, settings.port)
    config = uvicorn.Config(
        create_app(settings),
        loop="uvloop",
        http=with_limits(settings.limits),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=_STOP_S,
        backlog=2048,
    )
    host, port = bound.getsockname()[:2]
    server = _Server(config, lambda: on_listening(f"[{host}]:{port}" if ":" in host else f"{host}:{port}"))
    # uvicorn raises the signal that stopped it once more when it is done, for whoever had a handler before.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: None)
    server.run(sockets=[bound])


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_started = on_started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_started()


def _bound_socket(host: str, port: int) -> socket.socket:
    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
    except OSError as error:
        found.close()
        raise EnvironmentLacks(
            f"port {port} on {host} cannot be used: {error.strerror}", hint="choose another (0 takes a free one)"
        ) from None
    return found


def _log_to_stderr() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    for name, level in (("modelkiln.openai", logging.INFO), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(level)
        logger.propagate = False
