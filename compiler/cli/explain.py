"""`compile explain`: a graph before and after."""

from __future__ import annotations

import json
from pathlib import Path

import click

from compiler.cli.common import EXIT_CODES, common, repository_option


@click.command("explain", epilog=EXIT_CODES)
@click.argument("model", metavar="MODEL[:VERSION]")
@repository_option
@common
def command(model: str, repository: Path, as_json: bool) -> None:
    """Show a model's graph before and after: operators, parameters, operations, bytes, and what each pass did.

    \b
    Example:
      compile explain minilm_encoder
    """
    from compiler.explain import explanation, explanation_lines
    from compiler.repository import Repository

    found = explanation(Repository(repository).find(model))
    click.echo(json.dumps(found) if as_json else "\n".join(explanation_lines(found)))
