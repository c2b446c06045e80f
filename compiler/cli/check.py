"""`compile check`: the repository linter."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from compiler.annotations import Annotation
from compiler.cli.common import EXIT_CODES, annotate, common, format_option, repository_argument
from compiler.errors import RepositoryError
from compiler.triton_config import CONFIG_FILE

if TYPE_CHECKING:
    from compiler.check import Finding
    from compiler.repository import Repository


@click.command("check", epilog=EXIT_CODES)
@repository_argument
@common
@format_option
def command(repository: Path, as_json: bool) -> None:
    """Check REPOSITORY for what Triton would refuse, hang on, or quietly do wrong.

    \b
    Example:
      compile check model_repository --json
      compile check model_repository --format github
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
    annotate([_annotation(store, finding) for finding in findings])
    if any(f.level == "error" for f in findings):
        sys.exit(1)


def _annotation(store: Repository, finding: Finding) -> Annotation:
    config = store.path / finding.model / CONFIG_FILE
    line = re.search(rf"{re.escape(CONFIG_FILE)}:(\d+):", finding.message)
    file = config if config.is_file() else None
    return Annotation(finding.level, "modelkiln: check", str(finding), file, int(line[1]) if line else None)
