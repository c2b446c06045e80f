"""Calibration samples: read from `.npz` files or given by a function of the user's, and checked. No ranges here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from compiler.dtypes import AnyArray
from compiler.errors import ModelRefused, UsageError, one_of, where_it_failed

if TYPE_CHECKING:
    from compiler.spec import ModelSpec

# A generator may have no end.
MAX_SAMPLES = 4096


def calibration_samples(spec: ModelSpec, inputs: Sequence[str]) -> list[dict[str, AnyArray]]:
    """Returns the samples that a spec names.

    Args:
        spec: one with the key `calibration`.
        inputs: the names of the graph's inputs. A pass may have pruned some of the spec's: their arrays are dropped.

    Raises:
        SpecError: there is no such module or function.
        ModelRefused: the function failed.
        UsageError: a sample does not hold what the inputs need.
    """
    given = spec.calibration
    assert given is not None
    if given.is_function:
        samples = calibration_from_function(spec)
    else:
        samples = calibration_from_folder(spec.path.parent / given.data, [i.name for i in spec.inputs])
    return [{name: sample[name] for name in inputs} for sample in samples]


def calibration_code(spec: ModelSpec) -> dict[str, str]:
    """Returns sha256 by relative path of the source files behind a calibration function that was called."""
    from compiler.sources.code import factory_code

    given = spec.calibration
    return factory_code(given.data) if given is not None and given.is_function else {}


def calibration_from_function(spec: ModelSpec) -> list[dict[str, AnyArray]]:
    """Calls the spec's `module:function`, which gives mappings from each input's name to an array.

    The function is trusted as the factory is: it is the user's code, named in the user's spec.
    """
    from compiler.sources.code import function_named, importable

    given = spec.calibration
    assert given is not None
    node = spec.at("calibration")
    node = node if isinstance(node.value, str) else spec.at("calibration", "data")
    names = [i.name for i in spec.inputs]
    with importable(spec.path.parent):
        function = function_named(node, "calibration", given.data, spec.path.parent)
        try:
            taken = list(islice(function(), MAX_SAMPLES + 1))
        except Exception as error:
            raise ModelRefused(f"calibration: {given.data} failed: {where_it_failed(error)}") from error
    if not taken or len(taken) > MAX_SAMPLES:
        raise UsageError(
            f"calibration: {given.data} gave {'no sample' if not taken else f'more than {MAX_SAMPLES} samples'}",
            hint=f"give 1 to {MAX_SAMPLES} mappings from input names to arrays; some hundred rows are usually enough",
        )
    return samples_from(taken, names)


def calibration_from_folder(path: Path, inputs: Sequence[str]) -> list[dict[str, AnyArray]]:
    """Reads calibration samples: one `.npz` per sample or batch, in the order of their names.

    Args:
        path: a folder of `.npz` files, or one such file; each holds an array for every input.
        inputs: the names of the inputs.

    Raises:
        UsageError: nothing there, not an npz file, a name is missing or unknown. Pickled objects are refused.
    """
    files = [path] if path.is_file() else sorted(path.glob("*.npz"))
    if not files:
        raise UsageError(f"no calibration data: '{path}' has no .npz file", hint="save each sample with numpy.savez")
    return [_sample_from_file(file, inputs) for file in files]


def _sample_from_file(file: Path, inputs: Sequence[str]) -> dict[str, AnyArray]:
    try:
        with np.load(file, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
    except (OSError, ValueError, EOFError, AttributeError, TypeError) as error:
        reason = "it holds Python objects" if "pickle" in str(error).lower() else " ".join(str(error).split())[:200]
        raise UsageError(
            f"calibration file '{file}' is not plain arrays in an .npz: {reason}",
            hint="write it with numpy.savez(file, **{input name: array})",
        ) from error
    return checked_sample(arrays, inputs, f"calibration file '{file}'")


def samples_from(data: Iterable[Mapping[str, AnyArray]], inputs: Sequence[str]) -> list[dict[str, AnyArray]]:
    """Takes samples from any Python iterable, with the checks of `calibration_from_folder`."""
    return [checked_sample(sample, inputs, f"calibration sample {index}") for index, sample in enumerate(data)]


def checked_sample(sample: Mapping[str, AnyArray], inputs: Sequence[str], what: str) -> dict[str, AnyArray]:
    """Returns the sample's arrays by input.

    Raises:
        UsageError: it is no mapping, or a name is missing or unknown.
    """
    if not isinstance(sample, Mapping):
        raise UsageError(f"{what} is a {type(sample).__name__}", hint="give a mapping from input names to arrays")
    missing, unknown = sorted(set(inputs) - set(sample)), sorted(set(sample) - set(inputs))
    if missing or unknown:
        fault = f"lacks '{missing[0]}'" if missing else f"has '{unknown[0]}', which is no input"
        raise UsageError(f"{what} {fault}", hint=f"its names must be exactly the inputs: {one_of(inputs)}")
    return {name: np.asarray(sample[name]) for name in inputs}
