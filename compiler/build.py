"""One spec file in, one published version out: finds out what kind of spec it is and builds it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from compiler.build_order import order_by_need
from compiler.cache import Cache
from compiler.errors import UsageError
from compiler.lock import read_lock, write_lock
from compiler.manifest import BuildResult
from compiler.progress import Stage, silent_stage
from compiler.repository import Repository
from compiler.yaml_reader import Node, node_from_plain, read_yaml


@dataclass(frozen=True)
class BuildOptions:
    """What the command line says about a build.

    Attributes:
        force: build even where nothing changed.
        trust_pickle: let a source's files run code where they cannot be opened otherwise.
        cache: where results of stages are kept between builds; None for nowhere.
        locked: build what the lock beside the spec says, or refuse.
        write_lock: write that lock.
    """

    force: bool = False
    trust_pickle: bool = False
    cache: Cache | None = None
    locked: bool = False
    write_lock: bool = False


DEFAULT_OPTIONS = BuildOptions()


@dataclass(frozen=True)
class Job:
    """A spec that was read and validated, ready to build.

    Attributes:
        needs: names of the models that it wires; they are built before it.
        num_stages: how many stages a build with these options shows.
        build: (repository, options, stage) -> result.
    """

    name: str
    path: Path
    needs: tuple[str, ...]
    num_stages: Callable[[BuildOptions], int]
    build: Callable[[Repository, BuildOptions, Stage], BuildResult]


def expand_paths(paths: Sequence[Path]) -> list[Path]:
    """Replaces folders by the specs in them.

    Raises:
        UsageError: a folder without a spec.
    """
    files: list[Path] = []
    for path in paths:
        found = sorted(path.glob("*.yaml")) if path.is_dir() else [path]
        if not found:
            raise UsageError(f"{path} holds no spec (*.yaml)")
        files += found
    return list(dict.fromkeys(files))


def read_jobs(paths: Sequence[Path], overrides: Mapping[str, Any] | None = None) -> list[Job]:
    """Reads every spec before the first build starts: a mistake in the last must not cost the first's minutes.

    Args:
        paths: spec files, or folders of them.
        overrides: keys of a model spec with the values that stand for the file's, from the command line.

    Raises:
        UsageError: two specs have one name, or ensembles need each other in a circle.
    """
    jobs = [_job(read_yaml(path), path, overrides or {}) for path in expand_paths(paths)]
    names = [job.name for job in jobs]
    for job in jobs:
        if names.count(job.name) > 1:
            files = ", ".join(str(j.path) for j in jobs if j.name == job.name)
            raise UsageError(f"two specs are named '{job.name}': {files}", hint="give each model a name of its own")
    by_name = {job.name: job for job in jobs}
    return [by_name[name] for name in order_by_need(names, {job.name: job.needs for job in jobs})]


def build_job(
    job: Job, repository: Repository, options: BuildOptions = DEFAULT_OPTIONS, *, stage: Stage = silent_stage
) -> BuildResult:
    """Builds and publishes one spec.

    Raises:
        LockDiffers: with `locked`, before anything is published.
    """
    if options.locked:
        repository = replace(repository, accept=read_lock(job.path).require_result)
    result = job.build(repository, options, stage)
    if options.locked and not result.built:
        repository.accept(result.published.manifest)
    if options.write_lock:
        write_lock(job.path, result.published.manifest)
    return result


def _job(root: Node, path: Path, overrides: Mapping[str, Any]) -> Job:
    document = root.value if isinstance(root.value, dict) else {}
    source = document["source"].value if "source" in document else None
    if "steps" in document:
        from ensembles import graph

        ensemble = graph.ensemble_from_node(root, path)
        return Job(
            ensemble.name,
            path,
            tuple(dict.fromkeys(wired.model for wired in ensemble.steps)),
            lambda options: graph.NUM_STAGES,
            lambda repo, options, stage: graph.publish_ensemble(ensemble, repo, force=options.force, stage=stage),
        )
    if isinstance(source, dict) and "python" in source:
        from compiler import python_step

        step = python_step.python_step_from_node(root, path)
        return Job(
            step.name,
            path,
            (),
            lambda options: python_step.NUM_STAGES,
            lambda repo, options, stage: python_step.publish_step(step, repo, force=options.force, stage=stage),
        )
    from compiler import pipeline, spec

    if overrides and isinstance(root.value, dict):
        given = {key: node_from_plain(value, "command line") for key, value in overrides.items()}
        root = replace(root, value={**root.value, **given})
    model = spec.model_spec_from_node(root, path)
    return Job(
        model.name,
        path,
        (),
        lambda options: pipeline.num_stages(model, locked=options.locked),
        lambda repo, options, stage: pipeline.compile_model(
            model,
            repo,
            force=options.force,
            trust_pickle=options.trust_pickle,
            cache=options.cache,
            lock=read_lock(path) if options.locked else None,
            stage=stage,
        ),
    )
