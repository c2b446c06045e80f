"""`compile build -j`: what a person sees of several builds; each one's output stays together."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import click

from compiler.build import Job
from compiler.cli import build
from compiler.errors import ModelkilnError
from compiler.parallel import Outcome, Work, run_parallel
from compiler.progress import stderr_console


def build_side_by_side(jobs: Sequence[Job], num_workers: int, options: Sequence[str], as_json: bool) -> list[Any]:
    """Builds all jobs and returns their JSON results.

    Raises:
        ModelkilnError: some failed; it has the exit code of the first, and all others were built.
    """
    console = stderr_console()
    results: list[Any] = []
    unfinished = [job.name for job in jobs]
    status = console.status("") if console.is_terminal else None

    def on_change(running: list[str], waiting: int) -> None:
        if status:
            status.update(f"building {', '.join(running)}" + (f"; {waiting} more to come" if waiting else ""))

    def on_end(outcome: Outcome) -> None:
        unfinished.remove(outcome.name)
        click.echo(outcome.log, err=True, nl=False)
        if outcome.lacks:
            click.echo(f"{outcome.name}: not built, since '{outcome.lacks}' failed", err=True)
        elif outcome.exit_code == 0:
            results.extend(outcome.result["models"])
            if not as_json:
                click.echo(build.result_line(results[-1]))

    work = [Work(job.name, ("build", str(job.path), *options, "--json"), job.needs) for job in jobs]
    try:
        with status or nullcontext():
            outcomes = run_parallel(work, num_workers, on_end=on_end, on_change=on_change)
    except KeyboardInterrupt:
        for name in unfinished:
            click.echo(f"{name}: not published", err=True)
        raise
    failed = [o for o in outcomes if o.exit_code != 0]
    if failed:
        raise _failure(failed, len(jobs), results)
    return results


def _failure(failed: Sequence[Outcome], total: int, results: list[Any]) -> ModelkilnError:
    """Returns the first failure, with the names of the others."""
    first = failed[0]
    told = first.result.get("error", {})
    message = told.get("message", f"its process ended with code {first.exit_code}")
    names = ", ".join(o.name for o in failed)
    error = ModelkilnError(f"{len(failed)} of {total} were not built: {names}. The first, '{first.name}': {message}")
    error.hint = told.get("hint", "")
    error.kind = told.get("kind", error.kind)
    error.exit_code = told.get("exit_code", error.exit_code)
    failures = [{"model": o.name, "error": o.result.get("error"), "lacks": o.lacks} for o in failed]
    error.done = {"models": results, "failures": failures}
    return error
