"""What the commands share: the folder and the files of a report, progress on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)

from perf.errors import UsageError


def make_folder(folder: Path) -> None:
    """Before the measurement: one that cannot be written down is lost."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write to --output-dir {folder}: {error.strerror}") from error


def write_files(files: Mapping[Path, str]) -> None:
    """Write each text to its path."""
    for path, text in files.items():
        try:
            path.write_text(text, "utf-8")
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror}") from error


@contextmanager
def show_progress(measurements: int) -> Iterator[Callable[[int, str], None]]:
    """A bar on a terminal; elsewhere a line for each thing that happens. Both on stderr."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda done, text: click.echo(text, err=True)
        return
    columns = SpinnerColumn(), BarColumn(20), MofNCompleteColumn(), TextColumn("{task.description}")
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as bar:
        task = bar.add_task("starting", total=measurements)
        yield lambda done, text: bar.update(task, completed=done, description=text)
