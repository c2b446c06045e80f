"""`compile check`: the repository linter."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from compiler.cli.common import EXIT_CODES, common, repository_argument
from compiler.errors import RepositoryError


@click.command("check", epilog=EXIT_CODES)
@repository_argument
@common
def command(repository: Path, as_json: bool) -> None:
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
