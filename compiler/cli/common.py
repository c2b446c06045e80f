"""What all commands share: --json, --debug, the repository option, errors as one message and an exit code."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from compiler.errors import EnvironmentLacks, ModelkilnError

F = TypeVar("F", bound=Callable[..., Any])

EXIT_CODES = """
\b
Exit codes: 0 done; 1 the model or repository was refused; 2 wrong usage or
spec; 3 this machine lacks something (see `compile doctor`).
"""


def common(command: F) -> F:
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


repository_option = click.option(
    "--repository",
    "-r",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("model_repository"),
    show_default=True,
    envvar="MODELKILN_REPOSITORY",
    show_envvar=True,
    help="The model repository.",
)

repository_argument = click.argument(
    "repository",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("model_repository"),
    envvar="MODELKILN_REPOSITORY",
)
