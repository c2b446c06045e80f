"""`compile verify`: a published version proved again."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from compiler.cli.common import EXIT_CODES, common, repository_option


@click.command("verify", epilog=EXIT_CODES)
@click.argument("model", metavar="MODEL[:VERSION]")
@repository_option
@common
def command(model: str, repository: Path, as_json: bool) -> None:
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
