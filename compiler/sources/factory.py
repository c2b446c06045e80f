"""A factory: imported, called, and its weights loaded strictly. The only source that runs code of the user's."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compiler.errors import ModelRefused, where_it_failed
from compiler.files import resolve_file
from compiler.source_spec import FactorySource
from compiler.sources.base import OpenedSource, opened_module, trust_note
from compiler.sources.code import factory_code, function_named, importable
from compiler.sources.module import unwrapped
from compiler.sources.weights import pickle_notes, read_weights, some
from compiler.spec import ModelSpec

if TYPE_CHECKING:
    import torch


def factory_files(spec: ModelSpec, source: FactorySource) -> dict[str, Path]:
    """Returns the files that the spec names, by the name it gives them."""
    folder = spec.path.parent
    files = {}
    if source.weights:
        files[source.weights] = resolve_file(spec.at("source", "weights"), source.weights, folder)
    for index, name in enumerate(source.files):
        files[name] = resolve_file(spec.at("source", "files").value[index], name, folder)
    return files


def open_factory(spec: ModelSpec, source: FactorySource, trust_pickle: bool) -> OpenedSource:
    """Opens the factory's module as a source; raises as `load_module` does."""
    module, trusted = _load(spec, source, trust_pickle)
    return opened_module(
        module,
        spec,
        source.factory,
        code=lambda: factory_code(source.factory),
        notes=tuple(map(trust_note, trusted)) or pickle_notes(source.weights or ""),
        trusted=trusted,
    )


def load_module(spec: ModelSpec) -> torch.nn.Module:
    """Imports and calls the factory, then loads the weights strictly; the module comes back in eval mode.

    Raises:
        SpecError: the factory or the weight file does not exist.
        ModelRefused: the factory raised, or the weights do not fit the module by name and shape.
        EnvironmentLacks: a package that the factory's module needs is not installed.
    """
    assert isinstance(spec.source, FactorySource)
    return _load(spec, spec.source, trust_pickle=False)[0]


def _load(spec: ModelSpec, source: FactorySource, trust_pickle: bool) -> tuple[torch.nn.Module, tuple[str, ...]]:
    """Returns the module, and the names of the files that were opened although they can run code."""
    import torch

    weights = source.weights
    # Looked up first: a misspelt path must not cost the minute that some factories take.
    weight_file = resolve_file(spec.at("source", "weights"), weights, spec.path.parent) if weights else None
    with importable(spec.path.parent), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # weights that a factory draws at random are the same in each build
        module = unwrapped(_call_factory(spec, source), f"source.factory {source.factory}")
    trusted: tuple[str, ...] = ()
    if weights and weight_file is not None:
        state, was_trusted = read_weights(weight_file, f"source.weights {weights}", trust_pickle)
        _load_weights(module, spec, source, state)
        trusted = (weights,) if was_trusted else ()
    return module.eval(), trusted


def _call_factory(spec: ModelSpec, source: FactorySource) -> Any:
    build = function_named(spec.at("source", "factory"), "source.factory", source.factory, spec.path.parent)
    try:
        return build(**source.args)
    except Exception as error:
        raise ModelRefused(f"source.factory: {source.factory} failed: {where_it_failed(error)}") from error


def _load_weights(
    module: torch.nn.Module, spec: ModelSpec, source: FactorySource, state: dict[str, torch.Tensor]
) -> None:
    ignored = [k for k in state if any(fnmatch.fnmatchcase(k, p) for p in source.ignore_weights)]
    for pattern in source.ignore_weights:
        if not fnmatch.filter(ignored, pattern):
            spec.at("source", "ignore_weights").fail(f"source.ignore_weights: no weight matches '{pattern}'")
    state = {k: v for k, v in state.items() if k not in ignored}
    own = module.state_dict()
    state = _without_wrapper(state, own)
    missing, extra = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
    # One tensor under two names is often saved once (safetensors insists).
    missing = [m for m in missing if not any(_is_tied(own[m], own[k]) for k in own.keys() & state.keys())]
    shapes = [
        f"{k} is {list(state[k].shape)} in the file and {list(own[k].shape)} in the module"
        for k in sorted(own.keys() & state.keys())
        if own[k].shape != state[k].shape
    ]
    problems = [
        *([f"missing from the file: {some(missing)}"] if missing else []),
        *([f"not in the module: {some(extra)}"] if extra else []),
        *shapes[:5],
    ]
    if problems:
        raise ModelRefused(
            f"source.weights {source.weights} does not fit the module: " + "; ".join(problems),
            hint="weights that the module does not need can be named in source.ignore_weights (a glob)",
        )
    module.load_state_dict(state, strict=False)  # what is missing now is tied to what is not


def _without_wrapper(state: dict[str, torch.Tensor], own: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Takes off what DataParallel and torch.compile put before every name, where only that makes the names fit."""
    for prefix in ("module.", "_orig_mod.", "_orig_mod.module.", "module._orig_mod."):
        plain = {k.removeprefix(prefix): v for k, v in state.items()}
        if all(k.startswith(prefix) for k in state) and not own.keys() & state.keys() and own.keys() & plain.keys():
            return plain
    return state


def _is_tied(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.numel())
