"""Optimization profiles: the sizes that an engine accepts, from the spec's dims, checked against Triton's batch.

One profile for each engine, from the smallest to the largest size. Several profiles with holes between them, or with
a minimum above 1, make a server refuse small batches; Triton sends single requests as they come.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from compiler.errors import ModelRefused
from compiler.spec import ModelSpec
from compiler.tensors import BATCH_DIM

Shape = tuple[int, ...]


@dataclass(frozen=True)
class InputProfile:
    """The smallest, best and largest shape of one input."""

    name: str
    min: Shape
    opt: Shape
    max: Shape

    def to_json(self) -> dict[str, list[int]]:
        return {"min": list(self.min), "opt": list(self.opt), "max": list(self.max)}


def profiles_from_spec(spec: ModelSpec, inputs: Iterable[str]) -> tuple[InputProfile, ...]:
    """Returns a profile for each input that the graph kept.

    Args:
        spec: whose dims give the sizes.
        inputs: the names of the graph's inputs; a pruned input has no profile.
    """
    kept = set(inputs)

    def shape(tensor_shape: Sequence[int | str], end: str) -> Shape:
        return tuple(d if isinstance(d, int) else int(getattr(spec.dims[d], end)) for d in tensor_shape)

    return tuple(
        InputProfile(t.name, shape(t.shape, "min"), shape(t.shape, "opt"), shape(t.shape, "max"))
        for t in spec.inputs
        if t.name in kept
    )


def check_network_shapes(profiles: Iterable[InputProfile], shapes: Mapping[str, Sequence[int]]) -> None:
    """Compares profiles with the inputs of the parsed network, in which -1 is a variable size.

    Raises:
        ModelRefused: the network fixed a size that the spec lets vary; the engine would refuse every other one.
    """
    for profile in profiles:
        seen = list(shapes[profile.name])
        for axis, size in enumerate(seen):
            if size != -1 and not size == profile.min[axis] == profile.max[axis]:
                raise ModelRefused(
                    f"input '{profile.name}' is {seen} in the network: axis {axis} is fixed to {size}, and the spec "
                    f"lets it vary from {profile.min[axis]} to {profile.max[axis]}",
                    hint="the graph must keep the dim variable; see which pass or export fixed it",
                )


def batch_problems(profile: Mapping[str, Any], max_batch_size: int) -> list[str]:
    """Compares an engine's profile with Triton's max_batch_size; returns what would fail, in words.

    Args:
        profile: input name -> {min, opt, max}, as the manifest holds it.
        max_batch_size: of config.pbtxt; 0 serves without batching, and then every size is the model's own.
    """
    if max_batch_size <= 0:
        return []
    problems = []
    for name, shapes in sorted(profile.items()):
        try:
            smallest, largest = int(shapes["min"][0]), int(shapes["max"][0])
        except (KeyError, IndexError, TypeError, ValueError):
            problems.append(f"the engine's profile for '{name}' in the manifest is not one that `compile build` wrote")
            continue
        if smallest != 1:
            problems.append(f"the engine's profile for '{name}' starts at batch {smallest}; it must start at 1")
        if largest != max_batch_size:
            problems.append(
                f"max_batch_size is {max_batch_size}, and the engine's profile for '{name}' ends at batch {largest}"
            )
    return problems


def refuse_batch_problems(profile: Mapping[str, Any], max_batch_size: int) -> None:
    """Raises ModelRefused where the profile and max_batch_size do not agree."""
    problems = batch_problems(profile, max_batch_size)
    if problems:
        raise ModelRefused(
            "; ".join(problems),
            hint=f"both derive from dims.{BATCH_DIM} in the spec; something between it and the engine changed one",
        )
