"""`compile pin`: which versions of a model are served."""

from __future__ import annotations

import json
from pathlib import Path

import click

from compiler.cli.common import EXIT_CODES, common, repository_option
from compiler.errors import UsageError


@click.command("pin", epilog=EXIT_CODES)
@click.argument("model")
@click.argument("versions", nargs=-1, type=click.IntRange(1), metavar="VERSION...")
@click.option("--newest", is_flag=True, help="Serve the newest version again, as before any pin.")
@repository_option
@common
def command(model: str, versions: tuple[int, ...], newest: bool, repository: Path, as_json: bool) -> None:
    """Serve given versions of MODEL instead of the newest: a roll-back, or several side by side for a canary.

    Each is proved again first. config.pbtxt changes in one step, and a server reads it when it
    starts. New builds are published and not served until the pin names them or is taken off.

    \b
    Examples:
      compile pin my_model 3
      compile pin my_model 4 5     # and clients choose with clients.VersionSplit
      compile pin my_model --newest
    """
    from compiler.pins import pin
    from compiler.repository import Repository

    if newest == bool(versions):
        raise UsageError("give the versions to serve, or --newest", hint=f"compile pin {model} 3")
    store = Repository(repository)
    pin(store, model, versions)
    served = store.pinned(model) or [store.find(model).version]
    if as_json:
        click.echo(json.dumps({"model": model, "served": served, "pinned": bool(versions)}))
    else:
        which = f"version{'s' if len(served) > 1 else ''} {', '.join(map(str, served))}"
        click.echo(f"{model}: a server that starts now serves {which}")
