"""`compile openai`: the OpenAI API in front of a Triton server that runs already."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import click

from compiler.cli.common import EXIT_CODES, common, repository_option
from compiler.errors import EnvironmentLacks, RepositoryError, UsageError

KEY_VARIABLE = "MODELKILN_API_KEY"


@click.command("openai", epilog=EXIT_CODES)
@click.option("--triton", default="127.0.0.1:8001", show_default=True, help="HOST:PORT of Triton's gRPC.")
@repository_option
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=9000, show_default=True, type=click.IntRange(0, 65535), help="0 takes a free one.")
@click.option("--triton-metrics", metavar="URL", default="", help="Triton's metrics, to be passed on by /metrics.")
@click.option(
    "--api-key-file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help=f"A file with the key that clients must send. Or set {KEY_VARIABLE} to the key itself.",
)
@common
def command(
    triton: str,
    repository: Path,
    host: str,
    port: int,
    triton_metrics: str,
    api_key_file: Path | None,
    as_json: bool,
) -> None:
    """Serve the OpenAI API for the models of a running Triton server, until interrupted.

    REPOSITORY is the one that Triton serves, or a copy: tokenizers and chat templates are
    read from it. Start as many as are needed; `compile serve --openai-port` starts one beside
    the server. The key is no option, since options show in the list of processes.

    \b
    Examples:
      compile openai
      compile openai --triton 10.0.0.7:8001 -r /srv/model_repository --host 0.0.0.0 --port 80
      MODELKILN_API_KEY=... compile openai
    """
    require_packages()
    from clients.core import address_from_url
    from clients.errors import InputError
    from clients.openai_server.serve import run
    from clients.openai_server.settings import Settings

    if not repository.is_dir():
        raise RepositoryError(f"{repository} does not exist", hint="give the repository that Triton serves")
    try:
        triton = address_from_url(triton)
    except InputError as error:
        raise UsageError(f"--triton: {error}") from error
    if triton_metrics and not triton_metrics.startswith(("http://", "https://")):
        raise UsageError(
            f"--triton-metrics is {triton_metrics!r}; allowed: a URL such as http://127.0.0.1:8002/metrics"
        )
    settings = Settings(triton, repository, host, port, triton_metrics, read_key(api_key_file))
    warn_of_open_address(host, settings.api_key)
    run(settings, lambda address: _print_address(address, as_json))
    click.echo("stopped", err=True)


def read_key(file: Path | None) -> str:
    """Returns the key of a file, or of the environment, or an empty string.

    Raises:
        UsageError: the key cannot be sent in a header, or is empty.
    """
    import os

    given = os.environ.get(KEY_VARIABLE) if file is None else file.read_text(encoding="utf-8", errors="replace")
    if given is None:
        return ""
    key = given.strip()
    where = KEY_VARIABLE if file is None else str(file)
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise UsageError(
            f"the API key of {where} has {len(key)} characters; allowed: printable ASCII without spaces",
            hint="for no key, leave it out",
        )
    return key


def warn_of_open_address(host: str, key: str) -> None:
    from compiler.addresses import LOOPBACK

    if host not in LOOPBACK and not key:
        click.echo(
            f"warning: {host} is not a loopback address and there is no API key: everyone who reaches it can use the "
            "models",
            err=True,
        )


def require_packages() -> None:
    """Refuses where what the front end is made of is not installed."""
    lacking = [name for name in ("fastapi", "uvicorn", "uvloop", "httptools", "prometheus_client") if not _found(name)]
    if lacking:
        raise EnvironmentLacks(f"not installed: {', '.join(lacking)}", hint="pip install 'modelkiln[openai,llm]'")


def _found(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def _print_address(address: str, as_json: bool) -> None:
    url = f"http://{address}/v1"
    click.echo(json.dumps({"listening": True, "openai": url}) if as_json else f"OpenAI API  {url}")
    sys.stdout.flush()
