"""`compile build -j`: what a person sees of several builds; each one's output stays together."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from compiler.build import Job
from compiler.cli import build
from compiler.errors import ModelkilnError
from compiler.parallel import Outcome, Work, run_parallel
from compiler.progress import is_live, moving_line, stderr_console


def build_side_by_side(jobs: Sequence[Job], num_workers: int, options: Sequence[str], as_json: bool) -> list[Any]:
    """Builds all jobs and returns their JSON results.

    Raises:
        ModelkilnError: some failed; it has the exit code of the first, and all others were built.
    """
    console = stderr_console()
    results: list[Any] = []
    unfinished = [job.name for job in jobs]
    line = Text()
    live = moving_line(console, lambda: line) if is_live(console) else None

    def on_change(running: list[str], waiting: int) -> None:
        line.plain = f"building {', '.join(running)}" + (f"; {waiting} more to come" if waiting else "")

    def on_end(outcome: Outcome) -> None:
        unfinished.remove(outcome.name)
        if live:
            live.stop()
        click.echo(outcome.log, err=True, nl=False)
        if outcome.lacks:
            click.echo(f"{outcome.name}: not built, since '{outcome.lacks}' failed", err=True)
        elif outcome.exit_code == 0:
            results.extend(outcome.result["models"])
            if not as_json:
                click.echo(build.result_line(results[-1]))
        if live and unfinished:
            live.start()

    work = [Work(job.name, ("build", str(job.path), *options, "--json"), job.needs) for job in jobs]
    try:
        with live or nullcontext():
            outcomes = run_parallel(work, num_workers, on_end=on_end, on_change=on_change)
    except KeyboardInterrupt:
        for name in unfinished:
            click.echo(f"{name}: not published", err=True)
        raise
    failed = [o for o in outcomes if o.exit_code != 0]
    if failed:
        raise _failure(failed, jobs, results)
    return results


def _failure(failed: Sequence[Outcome], jobs: Sequence[Job], results: list[Any]) -> ModelkilnError:
    """Returns the first failure, with the names of the others."""
    paths = {job.name: job.path for job in jobs}
    parts = [_error(outcome, paths[outcome.name]) for outcome in failed]
    first = parts[0]
    names = ", ".join(o.name for o in failed)
    count = f"{len(failed)} of {len(jobs)} were not built"
    error = ModelkilnError(f"{count}: {names}. The first, '{failed[0].name}': {first.message}", hint=first.hint)
    error.kind, error.exit_code, error.parts = first.kind, first.exit_code, tuple(parts)
    failures = [{"model": o.name, "error": o.result.get("error"), "lacks": o.lacks} for o in failed]
    error.done = {"models": results, "failures": failures}
    return error


def _error(outcome: Outcome, spec: Path) -> ModelkilnError:
    """Returns the error that a build's process reported, as it was raised there."""
    told = outcome.result.get("error", {})
    lacks = f"'{outcome.name}' was not built, since '{outcome.lacks}' failed"
    message = told.get("message") or (lacks if outcome.lacks else f"its process ended with code {outcome.exit_code}")
    error = ModelkilnError(message, hint=told.get("hint", ""))
    error.kind, error.exit_code = told.get("kind", error.kind), told.get("exit_code", error.exit_code)
    error.spec = spec
    return error
