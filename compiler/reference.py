"""The oracle: the eager model, called by input name, its outputs flattened to names. Uses torch, knows no ONNX."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from compiler.cases import Case
from compiler.dtypes import AnyArray
from compiler.errors import ModelRefused, did_you_mean, one_of, where_it_failed
from compiler.spec import ModelSpec
from compiler.tensors import BATCH_DIM

if TYPE_CHECKING:
    import torch


def check_signature(module: torch.nn.Module, spec: ModelSpec) -> None:
    """Binds the spec's inputs to `forward` by name, never by position.

    Raises:
        SpecError: an input that `forward` does not have, or a required one that the spec lacks.
    """
    parameters = inspect.signature(module.forward).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    names = [n for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    given = [t.name for t in spec.inputs]
    inputs = spec.at("inputs")
    for index, name in enumerate(given):
        if name not in names and not takes_any:
            inputs.value[index].fail(
                f"forward() has no input '{name}'{did_you_mean(name, names)}; its inputs: {one_of(names)}"
            )
    needed = [n for n in names if parameters[n].default is inspect.Parameter.empty]
    for name in needed:
        if name not in given:
            inputs.fail(f"forward() needs the input '{name}', which the spec lacks; it has: {one_of(given)}")


def flatten_outputs(result: Any, spec: ModelSpec) -> tuple[Any, ...]:
    """Returns the output tensors in the spec's order; keys are matched by name, tuples by position.

    Raises:
        ModelRefused: the names or the number of outputs are not those of the spec.
    """
    wanted = [o.name for o in spec.outputs]
    if is_dataclass(result) and not isinstance(result, (type, Mapping)):
        result = {f.name: getattr(result, f.name) for f in fields(result)}
    if isinstance(result, tuple) and hasattr(result, "_fields"):
        result = dict(zip(result._fields, result, strict=True))
    if isinstance(result, Mapping):
        present = {k: v for k, v in result.items() if v is not None}
        for name in wanted:
            if name not in present:
                raise ModelRefused(
                    f"forward() returns no output '{name}'{did_you_mean(name, present)}; it returns: {one_of(present)}",
                    hint="outputs that come as a dict are matched by key, in any order",
                )
        return tuple(present[name] for name in wanted)
    values = tuple(result) if isinstance(result, (tuple, list)) else (result,)
    values = tuple(v for v in values if v is not None)
    if len(values) != len(wanted):
        raise ModelRefused(
            f"forward() returns {len(values)} output(s), the spec names {len(wanted)}: {', '.join(wanted)}"
        )
    return values


def run_reference(module: torch.nn.Module, spec: ModelSpec, case: Case) -> dict[str, AnyArray]:
    """Runs the eager model on one case.

    Raises:
        ModelRefused: the model itself fails at these sizes or values, or answers with NaN or infinity.
    """
    import torch

    inputs = {name: torch.from_numpy(np.array(array)) for name, array in case.inputs.items()}
    try:
        with torch.inference_mode():
            result = module(**inputs)
    except Exception as error:
        raise ModelRefused(
            f"the PyTorch model itself fails at {case.name}: {where_it_failed(error)}", hint=narrow(spec)
        ) from error
    outputs: dict[str, AnyArray] = {}
    for spec_output, value in zip(spec.outputs, flatten_outputs(result, spec), strict=True):
        if not isinstance(value, torch.Tensor):
            raise ModelRefused(f"output '{spec_output.name}' is {type(value).__name__}, not a tensor")
        outputs[spec_output.name] = value.detach().cpu().numpy()
    check_finite(outputs, case, "the PyTorch model")
    return outputs


def check_finite(outputs: Mapping[str, AnyArray], case: Case, model: str) -> None:
    """Refuses an oracle that answers NaN or infinity: nothing can be compared with that."""
    for name, array in outputs.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise ModelRefused(
                f"{model} itself answers NaN or infinity at {case.name}, output '{name}'",
                hint="narrow the input's range in the spec to what requests will hold",
            )


def check_output_shapes(spec: ModelSpec, case: Case, outputs: Mapping[str, AnyArray]) -> None:
    """Compares the shapes that the model gives with the spec's, and its first axis with the batch.

    Raises:
        ModelRefused: an axis has another size than the spec says, or rows are not requests' rows.
    """
    for tensor in spec.outputs:
        got = outputs[tensor.name].shape
        if spec.max_batch_size and (not got or got[0] != case.sizes[BATCH_DIM]):
            raise ModelRefused(
                f"output '{tensor.name}' has the shape {list(got)} at {case.name}: its first axis is not the batch",
                hint="Triton merges requests along the first axis and could not split this output; "
                f"return [batch, ...], or name the dim otherwise than '{BATCH_DIM}' to serve without batching",
            )
        if tensor.shape is None:
            continue
        want = tuple(case.sizes[d] if isinstance(d, str) else d for d in tensor.shape)
        if want != got:
            raise ModelRefused(
                f"output '{tensor.name}' has the shape {list(got)} at {case.name}, "
                f"the spec says {list(tensor.shape)} = {list(want)}"
            )


def narrow(spec: ModelSpec) -> str:
    """Returns the hint for a model that fails at a size or value that its spec promises."""
    ranges = ", ".join(f"{d.name} {d.min}..{d.max}" for d in spec.dims.values())
    if not ranges:
        return "fix the model, or the input's shape and range in the spec"
    return f"the spec promises every size in {ranges}: fix the model, or narrow the dims"
