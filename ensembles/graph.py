"""An ensemble as a graph of models: read, wired, and checked against its members before anything is written."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from compiler.build_key import up_to_date
from compiler.errors import SpecError, did_you_mean, one_of
from compiler.fingerprint import inputs_fingerprint
from compiler.manifest import BuildResult, manifest_head
from compiler.progress import Stage, silent_stage
from compiler.repository import Repository
from compiler.spec import model_name
from compiler.triton_config import (
    CONFIG_FILE,
    Step,
    TensorConfig,
    config_from_text,
    ensemble_config,
    text_from_config,
)
from compiler.yaml_reader import Node

NUM_STAGES = 1


@dataclass(frozen=True)
class Member:
    """A model that a step calls, as its config.pbtxt in the repository declares it."""

    name: str
    max_batch_size: int
    inputs: Mapping[str, TensorConfig]
    outputs: Mapping[str, TensorConfig]
    optional_inputs: frozenset[str]


@dataclass(frozen=True)
class EnsembleSpec:
    """Steps and wiring; dtypes and shapes come from the members.

    Attributes:
        inputs: names of the tensors that a client sends.
        outputs: names of the tensors that a client gets.
    """

    path: Path
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    steps: tuple[Step, ...]
    root: Node = field(compare=False, repr=False)


@dataclass(frozen=True)
class Wiring:
    """A checked ensemble: what it takes, what it gives, and how many at once."""

    max_batch_size: int
    inputs: tuple[TensorConfig, ...]
    outputs: tuple[TensorConfig, ...]
    steps: tuple[Step, ...]


def ensemble_from_node(root: Node, path: Path) -> EnsembleSpec:
    """Validates an ensemble's spec by itself; its members are looked at by `wire`.

    Raises:
        SpecError: with `file:line`.
    """
    table = root.table("the spec", required=("name", "inputs", "outputs", "steps"))
    steps = []
    for node in table["steps"].items("steps"):
        step = node.table("a step", required=("model", "inputs", "outputs"))
        inputs, outputs = (
            {k: v.string(f"{key} of a step") for k, v in step[key].mapping(f"{key} of a step").items()}
            for key in ("inputs", "outputs")
        )
        steps.append(Step(model_name(step["model"]), inputs, outputs))
    if not steps:
        table["steps"].fail("an ensemble needs at least one step")
    for node in table["inputs"].items("inputs"):
        if isinstance(node.value, dict) and "optional" in node.value:
            node.fail(
                "an ensemble's input cannot be optional: Triton runs every step of it for every request",
                hint="make the choice inside one step with `source: {python: ...}`, or publish two ensembles",
            )
    return EnsembleSpec(
        path=path,
        name=model_name(table["name"]),
        inputs=tuple(n.string("an input") for n in table["inputs"].items("inputs")),
        outputs=tuple(n.string("an output") for n in table["outputs"].items("outputs")),
        steps=tuple(steps),
        root=root,
    )


def read_member(repository: Repository, name: str) -> Member | None:
    """Reads a model's config from the repository; None where there is no such model."""
    path = repository.path / name / CONFIG_FILE
    if not path.is_file():
        return None
    config = config_from_text(path.read_text(encoding="utf-8"), f"{name}/{CONFIG_FILE}")
    type_name = config.DESCRIPTOR.fields_by_name["input"].message_type.fields_by_name["data_type"].enum_type

    def tensor(message: Any) -> TensorConfig:
        return TensorConfig(message.name, type_name.values_by_number[message.data_type].name, tuple(message.dims))

    return Member(
        name=name,
        max_batch_size=config.max_batch_size,
        inputs={t.name: tensor(t) for t in config.input},
        outputs={t.name: tensor(t) for t in config.output},
        optional_inputs=frozenset(t.name for t in config.input if t.optional),
    )


def wire(spec: EnsembleSpec, members: Mapping[str, Member]) -> Wiring:
    """Checks that every tensor has one source, fits where it goes, and goes somewhere.

    Raises:
        SpecError: names the step, the tensor, and what it should be.
    """
    _check_maps(spec, members)
    producers = _producers(spec, members)
    consumers: dict[str, list[tuple[str, TensorConfig]]] = {}
    for step in spec.steps:
        for inner, outer in step.inputs.items():
            consumers.setdefault(outer, []).append((f"{step.model}.{inner}", members[step.model].inputs[inner]))
    for outer, users in consumers.items():
        if outer not in producers:
            _fail(
                spec,
                f"tensor '{outer}' (read by {users[0][0]}) has no source{did_you_mean(outer, producers)}; "
                f"there are: {one_of(producers)}",
            )
    for outer, (source, tensor) in producers.items():
        users = consumers.get(outer, [])
        if not users and outer not in spec.outputs:
            what = (
                f"input '{outer}' is used by no step" if tensor is None else f"tensor '{outer}' ({source}) goes nowhere"
            )
            _fail(spec, what, "drop it from the spec, or add the step that reads it")
    _check_order(spec)
    kinds: dict[str, TensorConfig] = {}
    for outer, (source, tensor) in producers.items():
        users = consumers.get(outer, [])
        first = tensor or users[0][1]
        for user, wanted in users:
            _check_fit(spec, outer, source if tensor else users[0][0], first, user, wanted)
        kinds[outer] = TensorConfig(outer, first.triton_type, _narrowest(first, [w for _, w in users]))
    for outer in spec.outputs:
        if outer not in producers:
            _fail(
                spec,
                f"output '{outer}' is produced by no step{did_you_mean(outer, producers)}; "
                f"there are: {one_of(producers)}",
            )
    return Wiring(
        max_batch_size=_max_batch_size(spec, members),
        inputs=tuple(kinds[name] for name in spec.inputs),
        outputs=tuple(kinds[name] for name in spec.outputs),
        steps=spec.steps,
    )


def publish_ensemble(
    spec: EnsembleSpec, repository: Repository, *, force: bool = False, stage: Stage = silent_stage
) -> BuildResult:
    """Checks an ensemble against its members and publishes it; does nothing where that is done already."""
    started = time.monotonic()
    repository.check_publishable(spec.name)
    members = {}
    for step in spec.steps:
        member = read_member(repository, step.model)
        if member is None:
            known = [m for m in repository.models() if m != spec.name]
            _fail(
                spec,
                f"step '{step.model}' is not in {repository.path}{did_you_mean(step.model, known)}; "
                f"it has: {one_of(known)}",
                "build the members first: compile build takes several specs, in any order",
            )
        members[step.model] = member
        _check_not_within(spec, repository, (spec.name, step.model))
    document: dict[str, Any] = spec.root.plain()
    configs = {name: repository.path / name / CONFIG_FILE for name in members}
    fingerprint = inputs_fingerprint(document, configs, ())
    wiring = wire(spec, members)
    if not force and (current := up_to_date(repository, spec.name, fingerprint, spec.path.parent)):
        return BuildResult(current, built=False, seconds=time.monotonic() - started)
    with stage("publish") as log, tempfile.TemporaryDirectory(prefix="modelkiln-") as empty:
        config = ensemble_config(spec.name, wiring.max_batch_size, wiring.inputs, wiring.outputs, wiring.steps)
        manifest = {
            **manifest_head(document, fingerprint, {}, spec.path),
            "backend": "ensemble",
            "steps": [step.model for step in spec.steps],
        }
        published = repository.publish(spec.name, text_from_config(config), Path(empty), manifest)
        log.note(str(published.folder))
    return BuildResult(published, built=True, seconds=time.monotonic() - started)


def _fail(spec: EnsembleSpec, message: str, hint: str = "") -> NoReturn:
    raise SpecError(f"{spec.path}: ensemble '{spec.name}': {message}", hint=hint)


def _check_maps(spec: EnsembleSpec, members: Mapping[str, Member]) -> None:
    for step in spec.steps:
        member = members[step.model]
        for kind, given, known in (
            ("input", step.inputs, member.inputs),
            ("output", step.outputs, member.outputs),
        ):
            for name in given:
                if name not in known:
                    _fail(
                        spec,
                        f"model {step.model} has no {kind} '{name}'{did_you_mean(name, known)}; "
                        f"its {kind}s: {one_of(known)}",
                    )
        for name in member.inputs:
            if name not in step.inputs and name not in member.optional_inputs:
                _fail(
                    spec,
                    f"model {step.model} input {name} is not mapped",
                    f"add {name}: <tensor> to the step's inputs",
                )
        if not step.outputs:
            _fail(spec, f"model {step.model} has no output mapped: the step would have no effect")


def _producers(spec: EnsembleSpec, members: Mapping[str, Member]) -> dict[str, tuple[str, TensorConfig | None]]:
    """Returns who makes each tensor; for the ensemble's inputs the type is not known yet."""
    producers: dict[str, tuple[str, TensorConfig | None]] = {}
    for name in spec.inputs:
        if name in producers:
            _fail(spec, f"input '{name}' is named twice")
        producers[name] = ("input", None)
    for step in spec.steps:
        for inner, outer in step.outputs.items():
            if outer in producers:
                _fail(spec, f"tensor '{outer}' has two sources: {producers[outer][0]} and {step.model}.{inner}")
            producers[outer] = (f"{step.model}.{inner}", members[step.model].outputs[inner])
    return producers


def _check_order(spec: EnsembleSpec) -> None:
    """Refuses a cycle and prints it as A -> B -> A."""
    makers = {outer: i for i, step in enumerate(spec.steps) for outer in step.outputs.values()}
    needs = {i: {makers[o] for o in step.inputs.values() if o in makers} for i, step in enumerate(spec.steps)}
    done: set[int] = set()

    def visit(index: int, trail: list[int]) -> None:
        if index in trail:
            names = [spec.steps[i].model for i in [*trail[trail.index(index) :], index]]
            _fail(spec, f"the steps form a cycle: {' -> '.join(reversed(names))}")
        if index not in done:
            for need in sorted(needs[index]):
                visit(need, [*trail, index])
            done.add(index)

    for index in needs:
        visit(index, [])


def _check_not_within(spec: EnsembleSpec, repository: Repository, path: tuple[str, ...]) -> None:
    """Refuses a member that is made of this ensemble, however deep: it would call itself for ever."""
    published = repository.latest(path[-1])
    for name in (published.manifest.get("steps") or ()) if published else ():
        if name in path:
            _fail(spec, f"its members need each other in a circle: {' -> '.join((*path[path.index(name) :], name))}")
        _check_not_within(spec, repository, (*path, name))


def _check_fit(spec: EnsembleSpec, outer: str, source: str, have: TensorConfig, user: str, want: TensorConfig) -> None:
    if have.triton_type != want.triton_type:
        _fail(spec, f"tensor '{outer}' is {have.triton_type} in {source} and {want.triton_type} in {user}")
    same = len(have.dims) == len(want.dims)
    if not same or any(a != b and -1 not in (a, b) for a, b in zip(have.dims, want.dims, strict=True)):
        _fail(
            spec,
            f"tensor '{outer}' has the dims {list(have.dims)} in {source} and {list(want.dims)} in {user}",
        )


def _narrowest(first: TensorConfig, others: Sequence[TensorConfig]) -> tuple[int, ...]:
    dims = list(first.dims)
    for other in others:
        dims = [b if a == -1 else a for a, b in zip(dims, other.dims, strict=True)]
    return tuple(dims)


def _max_batch_size(spec: EnsembleSpec, members: Mapping[str, Member]) -> int:
    sizes = {step.model: members[step.model].max_batch_size for step in spec.steps}
    if 0 in sizes.values() and any(sizes.values()):
        shown = ", ".join(f"{name} {size}" for name, size in sizes.items())
        _fail(spec, f"members with and without batching do not go together (max_batch_size: {shown})")
    return min(sizes.values())
