"""`compile cache`: what builds keep between them."""

from __future__ import annotations

import json
from datetime import datetime

import click

from compiler.cli.common import EXIT_CODES, common


@click.group("cache", epilog=EXIT_CODES)
def command() -> None:
    """Show or clear what builds keep: exported graphs, reference outputs, converted graphs.

    The folder is MODELKILN_CACHE_DIR, else modelkiln in the user's cache home. It holds at most
    MODELKILN_CACHE_SIZE (10GiB); what was used longest ago goes first.

    \b
    Examples:
      compile cache show
      compile cache clear
    """


@command.command("show", epilog=EXIT_CODES)
@common
def show(as_json: bool) -> None:
    """List the entries, the last used first."""
    from compiler.cache import cache_from_environment
    from compiler.units import shown_bytes

    cache = cache_from_environment()
    entries = cache.entries()
    total = sum(e.num_bytes for e in entries)
    if as_json:
        found = {"path": str(cache.path), "max_bytes": cache.max_bytes, "bytes": total}
        click.echo(json.dumps({**found, "entries": [e.to_json() for e in entries]}))
        return
    for entry in entries:
        used = datetime.fromtimestamp(entry.used_at).strftime("%Y-%m-%d %H:%M")
        click.echo(f"{entry.model:<32} {entry.kind:<10} {shown_bytes(entry.num_bytes):>12}  {used}")
    click.echo(f"{cache.path}: {len(entries)} entries, {shown_bytes(total)} of at most {shown_bytes(cache.max_bytes)}")


@command.command("clear", epilog=EXIT_CODES)
@common
def clear(as_json: bool) -> None:
    """Remove every entry; other files in the folder stay."""
    from compiler.cache import cache_from_environment
    from compiler.units import shown_bytes

    cache = cache_from_environment()
    count, size = cache.clear()
    if as_json:
        click.echo(json.dumps({"path": str(cache.path), "removed": count, "bytes": size}))
    else:
        click.echo(f"{cache.path}: {count} entries removed, {shown_bytes(size)}")
