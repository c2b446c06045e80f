"""What all commands share: --json, --debug, the repository option, errors as one message and an exit code."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from compiler.annotations import MAX_SHOWN, Annotation, annotation_from_error, workflow_command
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
            annotate([annotation_from_error(part, part.spec) for part in known.parts or (known,)])
            click.echo(f"error: {known}", err=True)
            sys.exit(known.exit_code)

    return wrapped  # type: ignore[return-value]


def format_option(command: F) -> F:
    """Adds --format, which `annotate` reads."""

    @click.option(
        "--format",
        "output_format",
        type=click.Choice(("text", "github")),
        default="text",
        show_default=True,
        help="github: also print errors as annotations of files and lines, for GitHub Actions.",
    )
    @functools.wraps(command)
    def wrapped(*args: Any, output_format: str, **kwargs: Any) -> None:
        if output_format == "github" and kwargs.get("as_json"):
            raise click.UsageError("--json and --format github both write to stdout; give one of them")
        command(*args, **kwargs)

    return wrapped  # type: ignore[return-value]


def annotate(annotations: Sequence[Annotation]) -> None:
    """Prints annotations on stdout where the running command was asked for them, and says how many were left out."""
    if click.get_current_context().params.get("output_format") != "github":
        return
    root = Path(os.environ.get("GITHUB_WORKSPACE") or ".")
    for annotation in annotations[:MAX_SHOWN]:
        click.echo(workflow_command(annotation, root))
    if len(annotations) > MAX_SHOWN:
        left = Annotation("notice", "modelkiln", f"{len(annotations) - MAX_SHOWN} more are in the log")
        click.echo(workflow_command(left, root))


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
