"""The oracle: the eager model, called by input name, its outputs flattened to names. Uses torch, knows no ONNX."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from compiler.calling import flatten_outputs, nested_inputs
from compiler.cases import Case
from compiler.dtypes import DTYPES, AnyArray
from compiler.errors import ModelRefused, did_you_mean, one_of, where_it_failed
from compiler.spec import ModelSpec
from compiler.tensors import BATCH_DIM

if TYPE_CHECKING:
    import torch


def check_signature(module: torch.nn.Module, spec: ModelSpec) -> None:
    """Binds the spec's inputs to `forward` by name, never by position; `batch.left` is an entry of a dict `batch`.

    Raises:
        SpecError: an input that `forward` does not have, or a required one that the spec lacks.
    """
    parameters = inspect.signature(module.forward).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    names = [n for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    unnamed = [n for n, p in parameters.items() if p.kind in (p.VAR_POSITIONAL, p.POSITIONAL_ONLY)]
    given = [t.name for t in spec.inputs]
    tops = [name.partition(".")[0] for name in given]
    inputs = spec.at("inputs")
    hint = "an entry of an input that is a dict or a list is named as in batch.left or images.0"
    if unnamed:
        hint = f"'{unnamed[0]}' has no name to call it by: wrap the model in a module with named parameters"
    for index, (name, top) in enumerate(zip(given, tops, strict=True)):
        if top not in names and not takes_any:
            inputs.value[index].fail(
                f"forward() has no input '{top}'{did_you_mean(top, names)}; its inputs: {one_of(names)}", hint=hint
            )
        if any(other.startswith(f"{name}.") for other in given):
            inputs.value[index].fail(f"'{name}' cannot be a tensor and hold other inputs too")
    needed = [n for n in names if parameters[n].default is inspect.Parameter.empty]
    for name in needed:
        if name not in tops:
            inputs.fail(
                f"forward() needs the input '{name}', which the spec lacks; it has: {one_of(given)}",
                hint="what is no tensor gets its value in the factory: a default, or functools.partial around forward",
            )


def run_reference(module: torch.nn.Module, spec: ModelSpec, case: Case) -> dict[str, AnyArray]:
    """Runs the eager model on one case.

    Raises:
        ModelRefused: the model itself fails at these sizes or values, or answers with NaN, infinity or a type
            that Triton does not have.
    """
    import torch

    inputs = {name: torch.from_numpy(np.array(array)) for name, array in case.inputs.items()}
    try:
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's advice to developers; each case would print it again
            result = module(**nested_inputs(inputs))
    except Exception as error:
        raise ModelRefused(
            f"the PyTorch model itself fails at {case.name}: {where_it_failed(error)}",
            hint=_failure_hint(str(error), module, spec),
        ) from error
    names = [o.name for o in spec.outputs]
    outputs = {n: _array(n, v) for n, v in zip(names, flatten_outputs(result, names), strict=True)}
    check_finite(outputs, case, "the PyTorch model")
    return outputs


def _array(name: str, value: Any) -> AnyArray:
    import torch

    if not isinstance(value, torch.Tensor):
        raise ModelRefused(
            f"output '{name}' is {type(value).__name__}, not a tensor",
            hint="return it as a tensor, or leave it out of the spec where outputs are matched by name",
        )
    dtype = str(value.dtype).removeprefix("torch.")
    if dtype not in DTYPES or value.layout is not torch.strided or value.is_nested:
        form, advice = dtype, "torch.view_as_real(y)" if value.is_complex() else "y.float()"
        if dtype in DTYPES:
            form, advice = "a sparse or nested tensor", "y.to_dense(), or y.to_padded_tensor(0)"
        raise ModelRefused(f"output '{name}' is {form}, which is not served", hint=f"return {advice} instead")
    array: AnyArray = value.detach().cpu().numpy()
    return array


def _failure_hint(text: str, module: torch.nn.Module, spec: ModelSpec) -> str:
    """Returns what to change where the eager model fails."""
    if ("dtype" in text and "same" in text) or "expected scalar type" in text:
        types = sorted({str(p.dtype).removeprefix("torch.") for p in module.parameters()})
        given = ", ".join(f"{t.name} {t.dtype.name}" for t in spec.inputs)
        return (
            f"the weights are {one_of(types)}, the spec's inputs {given}: return model.float() from the factory "
            "(precision: fp16 or bf16 in the spec writes the lower type), or give the inputs the weights' dtype"
        )
    if "when training" in text:
        return "a batch norm computes the statistics of the request: give it training=False, or call eval() on it"
    return narrow(spec)


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
    same = "; dims that must be equal need one name" if len(spec.dims) > 1 else ""
    return f"the spec promises every size in {ranges}: fix the model, or narrow the dims{same}"
