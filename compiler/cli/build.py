"""`compile build`: specs in, published versions out."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from compiler.cli.common import EXIT_CODES, common, format_option, repository_option
from compiler.errors import ModelkilnError

if TYPE_CHECKING:
    from compiler.build import BuildOptions, Job

NOT_FOR_CHILDREN = ("jobs", "as_json", "output_format")


@click.command("build", epilog=EXIT_CODES)
@click.argument("specs", nargs=-1, required=True, type=click.Path(path_type=Path))
@repository_option
@click.option("--target", help="Instead of the spec's: onnxruntime, openvino, or auto for the fastest of all.")
@click.option("--precision", help="Instead of the spec's; auto for the fastest that keeps the tolerance.")
@click.option("--require-fusion", multiple=True, metavar="NAME=COUNT", help="Refuse a graph with fewer fusions.")
@click.option(
    "--slo",
    metavar="pNN=TIME",
    help="Choose by goodput on a real tritonserver among the candidates that keep this, as in p99=10ms.",
)
@click.option("--concurrency", type=click.IntRange(1, 1024), help="With --slo: requests in flight.  [default: 1]")
@click.option(
    "--jobs",
    "-j",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Build so many specs side by side. One that fails then stops only what needs it.",
)
@click.option("--force", is_flag=True, help="Build a new version even where nothing changed.")
@click.option("--lock", is_flag=True, help="Write beside each spec, as NAME.lock, what was built and from what.")
@click.option("--locked", is_flag=True, help="Build exactly what NAME.lock says, without a search, or refuse.")
@click.option("--no-cache", is_flag=True, help="Neither read nor write the cache (see `compile cache show`).")
@click.option(
    "--trust-pickle",
    is_flag=True,
    help="Open files that can run code: .pt2 archives, PyTorch weights. Only for files that you wrote yourself.",
)
@common
@format_option
def command(
    specs: tuple[Path, ...],
    repository: Path,
    target: str | None,
    precision: str | None,
    require_fusion: tuple[str, ...],
    slo: str | None,
    concurrency: int | None,
    jobs: int,
    force: bool,
    lock: bool,
    locked: bool,
    no_cache: bool,
    trust_pickle: bool,
    as_json: bool,
) -> None:
    """Compile, prove and publish the models of SPECS (files or folders of *.yaml).

    Nothing is published unless every check passed, and a spec whose inputs did not
    change is not built again. Ensembles are built after the models that they wire.

    \b
    Examples:
      compile build encoder.yaml
      compile build ensembles/text_embedding -r /srv/triton/model_repository
      compile build encoder.yaml --target auto --precision auto
      compile build encoder.yaml --target auto --slo p99=10ms --concurrency 8
      compile build encoder.yaml --require-fusion attention=6
      compile build encoder.yaml --lock; git add encoder.lock    # and in CI:
      compile build encoder.yaml --locked
      compile build a.yaml b.yaml c.yaml -j 2
      compile build ensembles/text_embedding --format github
      compile build encoder.yaml --json | jq .models[0].version
    """
    from compiler.build import BuildOptions, read_jobs
    from compiler.cache import cache_from_environment

    if lock and locked:
        raise click.UsageError("--lock writes what --locked keeps to; give one of them")
    given: dict[str, Any] = {"target": target, "precision": precision, "require_fusion": _counts(require_fusion)}
    given["slo"] = _slo(slo, concurrency)
    found = read_jobs(specs, {key: value for key, value in given.items() if value})
    cache = None if no_cache else cache_from_environment()
    options = BuildOptions(force, trust_pickle, cache, locked=locked, write_lock=lock)
    if jobs > 1 and len(found) > 1:
        from compiler.cli.side_by_side import build_side_by_side

        results = build_side_by_side(found, jobs, child_arguments(), as_json)
    else:
        results = _build_in_order(found, repository, options, as_json)
    if as_json:
        click.echo(json.dumps({"models": results}))


def _build_in_order(jobs: Sequence[Job], repository: Path, options: BuildOptions, as_json: bool) -> list[Any]:
    from compiler.build import build_job
    from compiler.parallel import TURNS_VARIABLE
    from compiler.progress import expected_seconds, stderr_console, terminal_stages
    from compiler.repository import Repository
    from compiler.turns import in_turns

    console, results = stderr_console(), list[Any]()
    turns = os.environ.get(TURNS_VARIABLE)
    for job in jobs:
        store = Repository(repository)
        stage = terminal_stages(job.name, console, job.num_stages(options), expected_seconds(store.manifests(job.name)))
        try:
            result = build_job(job, store, options, stage=in_turns(stage, Path(turns)) if turns else stage)
        except KeyboardInterrupt:
            click.echo(f"{job.name}: not published", err=True)
            raise
        except ModelkilnError as error:
            error.spec, error.done = job.path, {"models": results, **error.done}
            raise
        results.append({**result.to_json(), "pinned": store.pinned(job.name)})
        if not as_json:
            click.echo(result_line(results[-1]))
    return results


def result_line(result: Mapping[str, Any]) -> str:
    """Returns one line for a person about one model's JSON result."""
    done = "built" if result["built"] else "up to date"
    line = f"{result['model']} version {result['version']}: {done} in {result['seconds']:.1f} s ({result['path']})"
    return line + pin_note(result["version"], result["pinned"])


def pin_note(version: int, pinned: Sequence[int]) -> str:
    """Returns what a person should know of a version that is published and not served, or an empty string."""
    if not pinned or version in pinned:
        return ""
    return f"; not served: pinned to {', '.join(map(str, pinned))} (see `compile pin`)"


def child_arguments() -> tuple[str, ...]:
    """Returns the options of the running command, for a process that builds one of its specs."""
    context = click.get_current_context()
    found: list[str] = []
    for parameter in context.command.params:
        value = context.params.get(parameter.name or "")
        if not isinstance(parameter, click.Option) or parameter.name in NOT_FOR_CHILDREN or not value:
            continue
        flag = parameter.opts[0]
        if parameter.is_flag:
            found.append(flag)
        else:
            for text in value if parameter.multiple else [value]:
                found += [flag, str(text)]
    return tuple(found)


def _slo(text: str | None, concurrency: int | None) -> dict[str, Any]:
    if text is None and concurrency is not None:
        raise click.BadParameter("it says how --slo is measured, and there is no --slo", param_hint="--concurrency")
    name, _, limit = (text or "").partition("=")
    load = {"concurrency": concurrency} if concurrency is not None else {}
    return {name: limit, **load} if text else {}


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
