"""`compile build`: specs in, published versions out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from compiler.cli.common import EXIT_CODES, common, repository_option
from compiler.errors import ModelkilnError


@click.command("build", epilog=EXIT_CODES)
@click.argument("specs", nargs=-1, required=True, type=click.Path(path_type=Path))
@repository_option
@click.option("--target", help="Instead of the spec's: onnxruntime, openvino, or auto for the fastest of all.")
@click.option("--precision", help="Instead of the spec's; auto for the fastest that keeps the tolerance.")
@click.option("--require-fusion", multiple=True, metavar="NAME=COUNT", help="Refuse a graph with fewer fusions.")
@click.option("--force", is_flag=True, help="Build a new version even where nothing changed.")
@click.option("--no-cache", is_flag=True, help="Neither read nor write the cache (see `compile cache show`).")
@click.option(
    "--trust-pickle",
    is_flag=True,
    help="Open files that can run code: .pt2 archives, PyTorch weights. Only for files that you wrote yourself.",
)
@common
def command(
    specs: tuple[Path, ...],
    repository: Path,
    target: str | None,
    precision: str | None,
    require_fusion: tuple[str, ...],
    force: bool,
    no_cache: bool,
    trust_pickle: bool,
    as_json: bool,
) -> None:
    """Compile, prove and publish the models of SPECS (files or folders of *.yaml).

    Nothing is published unless every check passed, and a spec whose inputs did not
    change is not built again.

    \b
    Examples:
      compile build encoder.yaml
      compile build ensembles/text_embedding -r /srv/triton/model_repository
      compile build encoder.yaml --target auto --precision auto
      compile build encoder.yaml --require-fusion attention=6
      compile build encoder.yaml --json | jq .models[0].version
    """
    from compiler.build import BuildOptions, build_job, read_jobs
    from compiler.cache import cache_from_environment
    from compiler.progress import stderr_console, terminal_stages
    from compiler.repository import Repository

    console = stderr_console()
    store = Repository(repository)
    options = BuildOptions(force, trust_pickle, None if no_cache else cache_from_environment())
    results: list[dict[str, Any]] = []
    given = {"target": target, "precision": precision, "require_fusion": _counts(require_fusion)}
    for job in read_jobs(specs, {key: value for key, value in given.items() if value}):
        try:
            result = build_job(job, store, options, stage=terminal_stages(job.name, console, job.num_stages))
        except KeyboardInterrupt:
            click.echo(f"{job.name}: not published", err=True)
            raise
        except ModelkilnError as error:
            error.done = {"models": results}
            raise
        results.append(result.to_json())
        done = "built" if result.built else "up to date"
        if not as_json:
            version = f"{job.name} version {result.published.version}"
            click.echo(f"{version}: {done} in {result.seconds:.1f} s ({result.published.folder})")
    if as_json:
        click.echo(json.dumps({"models": results}))


def _counts(texts: tuple[str, ...]) -> dict[str, int]:
    counts = {}
    for text in texts:
        name, _, count = text.partition("=")
        if not name or not count.isdigit():
            raise click.BadParameter(
                f"{text!r} is not of the form NAME=COUNT, as in attention=6", param_hint="--require-fusion"
            )
        counts[name] = int(count)
    return counts
