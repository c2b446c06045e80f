"""`compile serve`: a real tritonserver on the repository until it is interrupted."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import click

from compiler.cli.common import EXIT_CODES, common, repository_argument
from compiler.errors import RepositoryError, UsageError
from perf.finite_range import FiniteRange


@click.command("serve", epilog=EXIT_CODES)
@repository_argument
@click.option("--host", default="127.0.0.1", show_default=True, envvar="MODELKILN_HOST", help="Address to listen on.")
@click.option("--http-port", default=8000, show_default=True, type=click.IntRange(0, 65535), help="0 takes a free one.")
@click.option("--grpc-port", default=8001, show_default=True, type=click.IntRange(0, 65535), help="0 takes a free one.")
@click.option(
    "--metrics-port",
    default=8002,
    show_default=True,
    type=click.IntRange(0, 65535),
    help="0 takes a free one.",
)
@click.option(
    "--ready-timeout",
    default=120.0,
    show_default=True,
    type=FiniteRange(1),
    help="Seconds to wait for READY.",
)
@click.option("--ready-within", metavar="TIME", help="Fail where a model needs longer to be READY: 10s.")
@click.option(
    "--openai-port",
    type=click.IntRange(0, 65535),
    help="Serve the OpenAI API there, too (see `compile openai`); 0 takes a free one.",
)
@click.option(
    "--openai-api-key-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A file with the key that its clients must send. Or set MODELKILN_API_KEY to the key itself.",
)
@click.option(
    "--max-restarts",
    default=5,
    show_default=True,
    type=click.IntRange(0),
    help="What dies more often within a minute stays down.",
)
@click.option("--no-restart", is_flag=True, help="Start nothing again; the same as --max-restarts 0.")
@click.option("--server-arg", multiple=True, help="A flag to pass on to tritonserver, such as --log-verbose=1.")
@click.option("--verbose", "-v", is_flag=True, help="Show all of the server's log.")
@common
def command(
    repository: Path,
    ready_within: str | None,
    openai_port: int | None,
    openai_api_key_file: Path | None,
    max_restarts: int,
    no_restart: bool,
    server_arg: tuple[str, ...],
    verbose: bool,
    as_json: bool,
    **ports: Any,
) -> None:
    """Serve REPOSITORY on a real tritonserver until interrupted.

    The repository is checked first; the addresses are printed when every model is READY.
    SIGINT or SIGTERM stops the server and everything it started.
    A model whose process dies is loaded again while the others go on, and a server that dies is started again.

    \b
    Examples:
      compile serve
      compile serve --openai-port 9000 --ready-within 10s
      compile serve model_repository --http-port 9000 --grpc-port 9001 --metrics-port 9002
    """
    from compiler.addresses import LOOPBACK, ServerOptions, check_front_port
    from compiler.cli.openai import read_key
    from compiler.front_end import FrontEnd
    from compiler.repository import Repository
    from compiler.restart_policy import RestartPolicy
    from compiler.server import TritonServer
    from compiler.server_log import worth_showing
    from compiler.shared_memory_need import shared_memory_warning
    from compiler.start_times import budgets_s, model_starts
    from compiler.supervision import Supervisor

    limit_s = _seconds("--ready-within", ready_within)

    def say(line: str) -> None:
        click.echo(line, err=True)

    def relay(line: str) -> None:
        if verbose or worth_showing(line):
            click.echo(f"triton: {line}", err=True)

    options = ServerOptions(
        repository,
        host=ports["host"],
        http_port=ports["http_port"],
        grpc_port=ports["grpc_port"],
        metrics_port=ports["metrics_port"],
        ready_timeout_s=ports["ready_timeout"],
        extra=server_arg,
    )
    if options.host not in LOOPBACK:
        click.echo(
            f"warning: {options.host} is not a loopback address: everyone who reaches it can use the models",
            err=True,
        )
    policy = RestartPolicy(0 if no_restart else max_restarts)
    try:
        with _stop_signals() as check, ExitStack() as stack:
            _refuse_findings(repository)
            if warning := shared_memory_warning(Repository(repository), server_arg):
                say(f"warning: {warning}")
            if openai_port is not None:
                check_front_port(options, openai_port)
                api_key = read_key(openai_api_key_file)
            server = stack.enter_context(TritonServer(options, relay, check))
            front = None
            if openai_port is not None:
                front = FrontEnd(repository, server.addresses, options.host, openai_port, api_key, check)
                stack.enter_context(front)
            starts = model_starts(server.log, budgets_s(_manifests(repository), limit_s))
            _print_addresses(server, front, starts, as_json)
            _judge_starts(starts, enforced=limit_s is not None)
            Supervisor(server, policy, say, check, front).run()
    except _Stopped:
        click.echo("stopped", err=True)


class _Stopped(BaseException):
    """SIGINT or SIGTERM came."""


@contextmanager
def _stop_signals() -> Iterator[Callable[[], None]]:
    """Yields what raises `_Stopped` after a signal, where we choose: not between a start and its record."""
    seen: list[int] = []
    previous = {
        number: signal.signal(number, lambda n, _: seen.append(n)) for number in (signal.SIGINT, signal.SIGTERM)
    }

    def check() -> None:
        if seen:
            raise _Stopped

    try:
        yield check
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _print_addresses(server: Any, front: Any, starts: Sequence[Any], as_json: bool) -> None:
    from compiler.start_times import start_table

    where, models = server.addresses, sorted(server.log.loaded)
    if as_json:
        result = {
            "ready": True,
            "models": models,
            "http": where.http,
            "grpc": where.grpc,
            "metrics": where.metrics,
            "pid": server.pid,
            "start": {start.model: start.to_json() for start in starts},
        }
        if front is not None:
            result |= {"openai": front.url, "openai_pid": front.pid}
        click.echo(json.dumps(result))
    else:
        click.echo(f"READY: {', '.join(models) or 'no models'}")
        click.echo(f"  HTTP     http://{where.http}")
        click.echo(f"  gRPC     {where.grpc}")
        click.echo(f"  metrics  {where.metrics}")
        if front is not None:
            click.echo(f"  OpenAI   {front.url}")
        if starts:
            click.echo("\n".join(["", "Seconds from the start of the server:", *start_table(starts)]))
    sys.stdout.flush()


def _seconds(option: str, text: str | None) -> float | None:
    from compiler.units import ms_from_text

    if text is None:
        return None
    milliseconds = ms_from_text(text)
    if not milliseconds:
        raise UsageError(f"{option} is '{text}'; allowed: a time such as 10s or 500ms")
    return milliseconds / 1000


def _manifests(repository: Path) -> dict[str, Mapping[str, Any]]:
    from compiler.repository import Repository

    store = Repository(repository)
    return {name: next(store.manifests(name), {}) for name in store.models()}


def _judge_starts(starts: Sequence[Any], *, enforced: bool) -> None:
    """Says which models missed their budgets; a server that is only late goes on, unless the command asks for more."""
    late = [str(start) for start in starts if start.late]
    if late and enforced:
        raise RepositoryError("\n".join(late), hint="another machine may be busy or slower: see the seconds by phase")
    for line in late:
        click.echo(f"warning: {line}", err=True)


def _refuse_findings(repository: Path) -> None:
    from compiler.check import check_repository
    from compiler.engine_host import this_host
    from compiler.repository import Repository

    if not repository.is_dir():
        raise RepositoryError(f"{repository} does not exist", hint="compile build SPEC makes it")
    findings = check_repository(Repository(repository), host=this_host())
    errors = [str(f) for f in findings if f.level == "error"]
    if errors:
        raise RepositoryError("the repository cannot be served:\n  " + "\n  ".join(errors))
