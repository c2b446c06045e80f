"""A bar for offline batches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def token_progress(num_requests: int, *, enabled: bool) -> Iterator[Callable[[int, int], None]]:
    """Shows answered requests and tokens per second on stderr, if that is a terminal.

    Yields:
        What is called after each step with the requests that ended and the tokens that came.
    """
    if not enabled or not sys.stderr.isatty():
        yield lambda ended, tokens: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("answers"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]} tokens/s"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=num_requests, speed="-")
        total = 0

        def advance(ended: int, tokens: int) -> None:
            nonlocal total
            total += tokens
            elapsed = bar.tasks[0].elapsed or 0.0
            bar.update(task, advance=ended, speed=f"{total / elapsed:.0f}" if elapsed else "-")

        yield advance
