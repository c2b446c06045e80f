"""The `compile` command: arguments in, exit code and report out. No logic of its own."""

from __future__ import annotations

import functools
import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click

from compiler import __version__
from compiler.errors import EnvironmentLacks, ModelkilnError, RepositoryError

F = TypeVar("F", bound=Callable[..., Any])

EXIT_CODES = """
\b
Exit codes: 0 done; 1 the model or repository was refused; 2 wrong usage or
spec; 3 this machine lacks something (see `compile doctor`).
"""


def _common(command: F) -> F:
    """Adds --json and --debug, and turns our errors into one message and an exit code."""

    @click.option("--json", "as_json", is_flag=True, help="Print one machine-readable result on stdout.")
    @click.option("--debug", is_flag=True, envvar="MODELKILN_DEBUG", help="Show the stack trace of an error.")
    @functools.wraps(command)
    def wrapped(*args: Any, as_json: bool, debug: bool, **kwargs: Any) -> None:
        try:
            command(*args, as_json=as_json, **kwargs)
        except (click.ClickException, click.exceptions.Exit):
            raise
        except KeyboardInterrupt:
            click.echo("interrupted", err=True)
            sys.exit(130)
        except Exception as error:
            if debug:
                raise
            known = error if isinstance(error, ModelkilnError) else _unexpected(error)
            if as_json:
                click.echo(json.dumps({**known.done, "error": known.to_json()}))
            click.echo(f"error: {known}", err=True)
            sys.exit(known.exit_code)

    return wrapped  # type: ignore[return-value]


def _unexpected(error: Exception) -> ModelkilnError:
    if isinstance(error, OSError) and error.strerror:
        return EnvironmentLacks(f"{error.strerror}: {error.filename}" if error.filename else error.strerror)
    text = " ".join(str(error).split())[:300]
    return ModelkilnError(
        f"{type(error).__name__}: {text}", hint="this is not your mistake: --debug shows where it happened"
    )


_repository_option = click.option(
    "--repository",
    "-r",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("model_repository"),
    show_default=True,
    envvar="MODELKILN_REPOSITORY",
    show_envvar=True,
    help="The model repository.",
)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}, epilog=EXIT_CODES)
@click.version_option(__version__, prog_name="compile")
def main() -> None:
    """From a PyTorch model to a served, measured NVIDIA Triton deployment.

    \b
    Examples:
      compile build ensembles/text_embedding        # every spec of a pipeline
      compile serve                                 # a real tritonserver on the repository
      compile check                                 # what Triton would refuse
      compile doctor                                # what this machine lacks
    """


@main.command(epilog=EXIT_CODES)
@click.argument("specs", nargs=-1, required=True, type=click.Path(path_type=Path))
@_repository_option
@click.option("--target", help="Instead of the spec's: onnxruntime, openvino, or auto for the fastest of all.")
@click.option("--precision", help="Instead of the spec's; auto for the fastest that keeps the tolerance.")
@click.option("--require-fusion", multiple=True, metavar="NAME=COUNT", help="Refuse a graph with fewer fusions.")
@click.option("--force", is_flag=True, help="Build a new version even where nothing changed.")
@click.option(
    "--trust-pickle",
    is_flag=True,
    help="Open files that can run code: .pt2 archives, PyTorch weights. Only for files that you wrote yourself.",
)
@_common
def build(
    specs: tuple[Path, ...],
    repository: Path,
    target: str | None,
    precision: str | None,
    require_fusion: tuple[str, ...],
    force: bool,
    trust_pickle: bool,
    as_json: bool,
) -> None:
    """Compile, prove and publish the models of SPECS (files or folders of *.yaml).

    Nothing is published unless every check passed, and a spec whose inputs did not
    change is not built again.

    \b
    Examples:
      compile build encoder.yaml
      compile build ensembles/text_embedding -r /srv/triton/model_repository
      compile build encoder.yaml --target auto --precision auto
      compile build encoder.yaml --require-fusion attention=6
      compile build encoder.yaml --json | jq .models[0].version
    """
    from compiler.build import BuildOptions, build_job, read_jobs
    from compiler.progress import stderr_console, terminal_stages
    from compiler.repository import Repository

    console = stderr_console()
    store = Repository(repository)
    options = BuildOptions(force=force, trust_pickle=trust_pickle)
    results: list[dict[str, Any]] = []
    given = {"target": target, "precision": precision, "require_fusion": _counts(require_fusion)}
    for job in read_jobs(specs, {key: value for key, value in given.items() if value}):
        try:
            result = build_job(job, store, options, stage=terminal_stages(job.name, console, job.num_stages))
        except KeyboardInterrupt:
            click.echo(f"{job.name}: not published", err=True)
            raise
        except ModelkilnError as error:
            error.done = {"models": results}
            raise
        results.append(result.to_json())
        done = "built" if result.built else "up to date"
        if not as_json:
            version = f"{job.name} version {result.published.version}"
            click.echo(f"{version}: {done} in {result.seconds:.1f} s ({result.published.folder})")
    if as_json:
        click.echo(json.dumps({"models": results}))


def _counts(texts: tuple[str, ...]) -> dict[str, int]:
    counts = {}
    for text in texts:
        name, _, count = text.partition("=")
        if not name or not count.isdigit():
            raise click.BadParameter(
                f"{text!r} is not of the form NAME=COUNT, as in attention=6", param_hint="--require-fusion"
            )
        counts[name] = int(count)
    return counts


@main.command(epilog=EXIT_CODES)
@click.argument(
    "repository",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("model_repository"),
    envvar="MODELKILN_REPOSITORY",
)
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
    type=click.FloatRange(1),
    help="Seconds to wait for READY.",
)
@click.option("--server-arg", multiple=True, help="A flag to pass on to tritonserver, such as --log-verbose=1.")
@click.option("--verbose", "-v", is_flag=True, help="Show all of the server's log.")
@_common
def serve(repository: Path, server_arg: tuple[str, ...], verbose: bool, as_json: bool, **ports: Any) -> None:
    """Serve REPOSITORY on a real tritonserver until interrupted.

    The repository is checked first; the addresses are printed when every model is READY.
    SIGINT or SIGTERM stops the server and everything it started.

    \b
    Examples:
      compile serve
      compile serve model_repository --http-port 9000 --grpc-port 9001 --metrics-port 9002
    """
    from compiler.addresses import LOOPBACK, ServerOptions
    from compiler.server import TritonServer
    from compiler.server_log import worth_showing

    _refuse_findings(repository)

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
    try:
        with _stop_signals(), TritonServer(options, relay) as server:
            _print_addresses(server, as_json)
            code = server.wait()
            raise RepositoryError(
                f"tritonserver ended by itself with code {code}", hint="run with --verbose to see its log"
            )
    except _Stopped:
        click.echo("stopped", err=True)


class _Stopped(BaseException):
    """SIGINT or SIGTERM came."""


@contextmanager
def _stop_signals() -> Iterator[None]:
    def stop(number: int, frame: Any) -> None:
        raise _Stopped

    previous = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _print_addresses(server: Any, as_json: bool) -> None:
    where, models = server.addresses, sorted(server.log.loaded)
    if as_json:
        result = {
            "ready": True,
            "models": models,
            "http": where.http,
            "grpc": where.grpc,
            "metrics": where.metrics,
            "pid": server.pid,
        }
        click.echo(json.dumps(result))
    else:
        click.echo(f"READY: {', '.join(models) or 'no models'}")
        click.echo(f"  HTTP     http://{where.http}")
        click.echo(f"  gRPC     {where.grpc}")
        click.echo(f"  metrics  {where.metrics}")
    sys.stdout.flush()


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


@main.command(epilog=EXIT_CODES)
@click.argument(
    "repository",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("model_repository"),
    envvar="MODELKILN_REPOSITORY",
)
@_common
def check(repository: Path, as_json: bool) -> None:
    """Check REPOSITORY for what Triton would refuse, hang on, or quietly do wrong.

    \b
    Example:
      compile check model_repository --json
    """
    from compiler.check import check_repository
    from compiler.engine_host import this_host
    from compiler.repository import Repository

    if not repository.is_dir():
        raise RepositoryError(f"{repository} does not exist", hint="compile build SPEC makes it")
    store = Repository(repository)
    findings = check_repository(store, host=this_host())
    if as_json:
        click.echo(json.dumps({"models": store.models(), "findings": [f.to_json() for f in findings]}))
    else:
        for finding in findings:
            click.echo(f"{finding.level}: {finding}")
        click.echo(f"{len(store.models())} models, {len(findings)} findings")
    if any(f.level == "error" for f in findings):
        sys.exit(1)


@main.command(epilog=EXIT_CODES)
@click.argument("model", metavar="MODEL[:VERSION]")
@_repository_option
@_common
def verify(model: str, repository: Path, as_json: bool) -> None:
    """Prove a published version again: its files against the reference outputs that it carries.

    Opens the file as it is served and compares every output of every recorded case.

    \b
    Examples:
      compile verify minilm_encoder
      compile verify minilm_encoder:3 --json
    """
    from compiler.recorded import verify_again
    from compiler.repository import Repository

    store = Repository(repository)
    published = store.find(model)
    report = verify_again(store, published)
    shown = f"{published.model} version {published.version}"
    if as_json:
        result = {"model": published.model, "version": published.version, "passed": not report.failures}
        click.echo(json.dumps({**result, "parity": report.to_json()}))
    else:
        click.echo(f"{'case':<44} {'output':<16} {'max abs':>9} {'max rel':>9} {'cosine':>10} {'outliers':>9}")
        for c in report.comparisons:
            figures = f"{c.max_abs:>9.2e} {c.max_rel:>9.2e} {c.cosine:>10.7f} {c.outliers:>9.2%}"
            click.echo(f"{c.case:<44} {c.output:<16} {figures} {c.problem}")
        click.echo(f"{shown}: {len(report.failures)} of {len(report.comparisons)} comparisons failed")
    if report.failures:
        sys.exit(1)


@main.command(epilog=EXIT_CODES)
@click.argument("model", metavar="MODEL[:VERSION]")
@_repository_option
@_common
def explain(model: str, repository: Path, as_json: bool) -> None:
    """Show a model's graph before and after: operators, parameters, operations, bytes, and what each pass did.

    \b
    Example:
      compile explain minilm_encoder
    """
    from compiler.explain import explanation, explanation_lines
    from compiler.repository import Repository

    found = explanation(Repository(repository).find(model))
    click.echo(json.dumps(found) if as_json else "\n".join(explanation_lines(found)))


@main.command(epilog=EXIT_CODES)
@_repository_option
@_common
def doctor(repository: Path, as_json: bool) -> None:
    """Look at this machine: what was found, what each lack prevents, how to mend it.

    Exit code 3 where something that serving needs is missing or wrong.
    """
    from compiler.doctor import FAULT, LACK, examine
    from compiler.repository import Repository

    checks = examine(Repository(repository))
    if as_json:
        click.echo(json.dumps({"checks": [c.to_json() for c in checks]}))
    else:
        marks = {FAULT: "FAULT", LACK: "lack"}
        for item in checks:
            click.echo(f"{marks.get(item.status, 'ok'):<6} {item.name:<14} {item.found}")
            if item.prevents:
                click.echo(f"{'':<21} prevents: {item.prevents}")
            if item.fix:
                click.echo(f"{'':<21} fix: {item.fix}")
    if any(c.status == FAULT for c in checks):
        sys.exit(3)


if __name__ == "__main__":
    main()
