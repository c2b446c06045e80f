"""`compile doctor`: what this machine has and lacks."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from compiler.cli.common import EXIT_CODES, common, repository_option


@click.command("doctor", epilog=EXIT_CODES)
@repository_option
@common
def command(repository: Path, as_json: bool) -> None:
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
