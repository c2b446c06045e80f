"""`compile verify`: a published version proved again."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from compiler.annotations import Annotation
from compiler.cli.common import EXIT_CODES, annotate, common, format_option, repository_option
from compiler.errors import UsageError

if TYPE_CHECKING:
    from compiler.repository import Published, Repository


@click.command("verify", epilog=EXIT_CODES)
@click.argument("model", metavar="MODEL[:VERSION]")
@repository_option
@click.option(
    "--spec",
    type=click.Path(path_type=Path),
    help="Also run this spec's metric, which is code: only for a spec that you trust.",
)
@common
@format_option
def command(model: str, repository: Path, spec: Path | None, as_json: bool) -> None:
    """Prove a published version again: its files against the reference outputs that it carries.

    Opens the file as it is served and compares every output of every recorded case. A language model
    carries none: its logits are compared with those of a plain decoder again, as compile llm does.

    \b
    Examples:
      compile verify minilm_encoder
      compile verify minilm_encoder:3 --json
      compile verify my_model --spec my_model.yaml  # its metric too
      compile verify chat                           # a language model
    """
    from compiler.llm.config import BACKEND
    from compiler.recorded import verify_again, verify_metric
    from compiler.repository import Repository

    store = Repository(repository)
    published = store.find(model)
    if published.manifest.get("backend") == BACKEND:
        _verify_llm(store, published, spec, as_json)
        return
    report = verify_again(store, published)
    metric = verify_metric(published, spec) if spec else None
    failed = bool(report.failures or (metric and metric["problem"]))
    shown = f"{published.model} version {published.version}"
    if as_json:
        result = {"model": published.model, "version": published.version, "passed": not failed}
        click.echo(json.dumps({**result, "parity": report.to_json(), "metric": metric}))
    else:
        click.echo(f"{'case':<44} {'output':<16} {'max abs':>9} {'max rel':>9} {'cosine':>10} {'outliers':>9}")
        for c in report.comparisons:
            figures = f"{c.max_abs:>9.2e} {c.max_rel:>9.2e} {c.cosine:>10.7f} {c.outliers:>9.2%}"
            click.echo(f"{c.case:<44} {c.output:<16} {figures} {c.problem}")
        click.echo(f"{shown}: {len(report.failures)} of {len(report.comparisons)} comparisons failed")
        for line in _metric_lines(metric, published.manifest.get("metric")):
            click.echo(line)
    problems = [f"{shown}: {c.case}, output '{c.output}': {c.problem}" for c in report.failures]
    problems += [f"{shown}: {metric['problem']}"] if metric and metric["problem"] else []
    annotate([Annotation("error", "modelkiln: verify", problem) for problem in problems])
    if failed:
        sys.exit(1)


def _verify_llm(store: Repository, published: Published, spec: Path | None, as_json: bool) -> None:
    from compiler.llm.verify import verify_llm

    if spec is not None:
        raise UsageError(f"--spec is {spec}, and '{published.model}' is a language model", hint="leave --spec away")
    report = verify_llm(store, published)
    shown = f"{published.model} version {published.version}"
    if as_json:
        result = {"model": published.model, "version": published.version, "passed": not report.problem}
        click.echo(json.dumps({**result, "parity": report.to_json(), "metric": None}))
    else:
        then = published.manifest["llm"]["parity"]
        click.echo(f"{'':<10} {'positions':>9} {'nmse':>9} {'max abs':>9} {'same token':>11}")
        for name, parity in (("built", then), ("now", report.to_json())):
            figures = f"{parity['nmse']:>9.1e} {parity['max_abs']:>9.1e} {parity['agreement']:>11.1%}"
            click.echo(f"{name:<10} {parity['num_positions']:>9} {figures}")
        click.echo(f"{shown}: {report.problem or 'the logits are those of the plain decoder'}")
    if report.problem:
        annotate([Annotation("error", "modelkiln: verify", f"{shown}: {report.problem}")])
        sys.exit(1)


def _metric_lines(now: Mapping[str, Any] | None, then: Mapping[str, Any] | None) -> list[str]:
    if now is None:
        return (
            [f"metric {then['function']} was {then['value']:g} when it was built; --spec FILE runs it again"]
            if then
            else []
        )
    eager = f", {now['eager']:g} of the eager model" if now["eager"] is not None else ""
    return [f"metric {now['function']}: {now['value']:g}{eager} {now['problem']}".rstrip()]
