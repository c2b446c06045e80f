"""PyTorch -> ONNX, with every dynamic dim proved to be dynamic. Owns torch.export; passes come later."""

from __future__ import annotations

import contextlib
import logging
import re
import warnings
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from compiler.calling import flatten_outputs, nested_inputs
from compiler.cases import Case, larger_sizes, make_case
from compiler.errors import ModelRefused
from compiler.export_operators import translations
from compiler.export_refusals import (
    conversion_refusal,
    export_refusal,
    hidden_prints,
    refuse_baked_operators,
    user_line,
)
from compiler.guards import guards_of, smallest_sizes, unproved_guards
from compiler.recurrent import recurrent_layers_whole
from compiler.spec import ModelSpec

if TYPE_CHECKING:
    import onnx_ir as ir
    import torch


_RANDOM = ["RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial", "Bernoulli"]


@dataclass(frozen=True)
class Exported:
    """The exporter's graph and how it was made.

    Attributes:
        model: the ONNX graph, inputs and outputs named as in the spec, dims named as in the spec.
        exporter: which exporter ran; recorded, since torch has changed its default more than once.
        opset: the opset read back from the graph.
        notes: what was changed on the way, for the report.
    """

    model: ir.Model
    exporter: str
    opset: int
    notes: tuple[str, ...] = ()


def export_onnx(module: torch.nn.Module, spec: ModelSpec, case: Case) -> Exported:
    """Exports the module, traced at the sizes of `case`.

    Raises:
        ModelRefused: a dim of the spec became a number, the graph depends on values, an operator has no
            ONNX form, or the opset could not be kept. The message names the line of the model.
    """
    import torch
    from onnx_ir.passes.common import NameFixPass

    with quiet():
        model, notes = _converted(module, spec, case)
        shared = _shared_outputs(model)
        if shared:
            # An input that is returned as it is, or one value twice: a value of a graph has one name.
            model, notes = _converted(module, spec, case, copied=shared)
    # The exporter names inner values after operators ("embedding", "linear"); an output may be called the same.
    NameFixPass()(model)
    opset = model.opset_imports.get("", 0)
    if opset != spec.opset:
        raise ModelRefused(
            f"asked for opset {spec.opset}, the exporter gave {opset}: an operator has no lower form",
            hint=f"set opset: {opset} in the spec",
        )
    _name_dims(model, spec)
    check_interface(model, spec)
    refuse_random(model)
    return Exported(model, f"torch.onnx.export(dynamo=True), torch {torch.__version__}", opset, notes)


def _converted(
    module: torch.nn.Module, spec: ModelSpec, case: Case, copied: Collection[int] = ()
) -> tuple[ir.Model, tuple[str, ...]]:
    """Returns the exporter's graph, and notes for the report; the outputs at the positions `copied` are copies."""
    import torch

    program, notes = _traced(_by_name(module, spec, copied), spec, case)
    notes += _cast_reversed_subtractions(program)
    refuse_baked_operators(program)
    try:
        onnx_program = torch.onnx.export(
            program,
            dynamo=True,
            input_names=[t.name for t in spec.inputs],
            output_names=[o.name for o in spec.outputs],
            opset_version=spec.opset,
            custom_translation_table=translations(),
            optimize=False,
            verbose=False,
        )
    except Exception as error:
        raise conversion_refusal(error) from error
    assert onnx_program is not None
    return onnx_program.model, notes


def _traced(
    wrapper: torch.nn.Module, spec: ModelSpec, case: Case
) -> tuple[torch.export.ExportedProgram, tuple[str, ...]]:
    """Traces with the spec's dims; a guard that holds for all their sizes is not held against the model.

    Where small sizes fix a dim, larger ones are tried: a window of 4 makes one of the traced 4, and 1 is a constant.
    """
    first: ModelRefused | None = None
    guards: list[str] = []
    for traced in (case, make_case(spec, "export, larger", larger_sizes(spec), padded=False)):
        args = _args(spec, traced)
        try:
            return _trace(wrapper, spec, args, defer=False), ()
        except Exception as error:
            first = first or export_refusal(error, wrapper, args, spec, traced)
            if "Constraints violated" not in str(error):
                break
            guards = guards_of(str(error), spec)
        if guards and not unproved_guards(guards, spec):
            notes = tuple(f"note: the exporter could not prove {g}; tried for all sizes, it holds" for g in guards)
            with contextlib.suppress(Exception):
                return _trace(wrapper, spec, args, defer=True), notes
    assert first is not None
    if better := smallest_sizes(guards, spec):
        shown = ", ".join(f"{name}: {{min: {low}}}" for name, low in better.items())
        raise ModelRefused(first.message, hint=f"{first.hint}; it can be exported with {shown}")
    raise first


def _args(spec: ModelSpec, case: Case) -> tuple[torch.Tensor, ...]:
    import torch

    return tuple(torch.from_numpy(case.inputs[t.name].copy()) for t in spec.inputs)


def _trace(
    wrapper: torch.nn.Module, spec: ModelSpec, args: tuple[torch.Tensor, ...], *, defer: bool
) -> torch.export.ExportedProgram:
    """Runs torch.export; with `defer` its guards become checks at run time, which an ONNX graph leaves out."""
    import torch

    # min=1: export treats 0 and 1 as special, but a file that serves one request must accept 1.
    dims = {d.name: torch.export.Dim(d.name, min=d.min, max=d.max) for d in spec.dims.values() if d.max > d.min}
    shapes = tuple(
        {axis: dims[s] for axis, s in enumerate(t.shape) if isinstance(s, str) and s in dims} for t in spec.inputs
    )
    with hidden_prints(), recurrent_layers_whole():
        return torch.export.export(
            wrapper, args, dynamic_shapes=(shapes,), prefer_deferred_runtime_asserts_over_guards=defer
        )


def _by_name(module: torch.nn.Module, spec: ModelSpec, copied: Collection[int] = ()) -> torch.nn.Module:
    """Wraps the module so that inputs go in by name and outputs come out in the spec's order."""
    import torch

    names = [o.name for o in spec.outputs]

    class NamedModule(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = module

        def forward(self, *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
            inputs = {tensor.name: arg for tensor, arg in zip(spec.inputs, args, strict=True)}
            outputs = flatten_outputs(self.model(**nested_inputs(inputs)), names)
            return tuple(v.clone() if i in copied else v for i, v in enumerate(outputs))

    return NamedModule().eval()


def _shared_outputs(model: ir.Model) -> list[int]:
    """Returns the positions of outputs that are inputs, weights, or the same value as an earlier output."""
    outputs = list(model.graph.outputs)
    return [i for i, v in enumerate(outputs) if v.producer() is None or any(v is other for other in outputs[:i])]


def _cast_reversed_subtractions(program: torch.export.ExportedProgram) -> tuple[str, ...]:
    """Makes `1.0 - mask` on integers a subtraction of floats.

    The exporter (torch 2.13) has no form of it for a number on the left and an integer tensor on the right.
    """
    import torch

    aten, places = torch.ops.aten, []
    for node in program.graph.nodes:
        if node.op != "call_function" or node.target is not aten.rsub.Scalar:
            continue
        tensor, result = node.args[0], node.meta["val"].dtype
        if tensor.meta["val"].dtype != result:
            with program.graph.inserting_before(node):
                cast = program.graph.call_function(aten.to.dtype, (tensor, result))
            cast.meta = {**node.meta, "val": tensor.meta["val"].to(result)}
            node.replace_input_with(tensor, cast)
            places.append(user_line(str(node.meta.get("stack_trace", ""))))
    return tuple(f"note: the integers are cast before the number is subtracted from, at {p}" for p in places)


def _name_dims(model: ir.Model, spec: ModelSpec) -> None:
    """Gives the graph's input dims the spec's names; the exporter calls them s43 and so on."""
    import onnx_ir as ir

    renamed: dict[str, str] = {}
    for tensor, value in zip(spec.inputs, model.graph.inputs, strict=True):
        for axis, name in enumerate(tensor.shape):
            seen = value.shape[axis] if value.shape is not None else None
            if isinstance(name, str) and isinstance(seen, ir.SymbolicDim) and seen.value:
                renamed[seen.value] = name
    for value in (*model.graph.inputs, *model.graph.outputs):
        if value.shape is None:
            continue
        for axis, dim in enumerate(value.shape):
            if isinstance(dim, ir.SymbolicDim) and dim.value:
                text = re.sub(r"\bs\d+\b", lambda m: renamed.get(m.group(), m.group()), dim.value)
                value.shape[axis] = text


def graph_shape(value: ir.Value) -> tuple[int | str, ...]:
    """Returns a value's shape: numbers, names, or `?` where the graph does not say."""
    if value.shape is None:
        return ("?",)
    return tuple(d if isinstance(d, int) else str(d.value or "?") for d in value.shape)


def check_interface(
    model: ir.Model, spec: ModelSpec, hint: str = "use -1 or x.shape[...] where the model writes the number"
) -> None:
    """Reads the dims back from the graph: what the spec calls dynamic must have no number.

    Raises:
        ModelRefused: with the tensor, the axis, the dim and the number; `hint` says what to do.
    """
    for tensor, value in zip(spec.tensors, (*model.graph.inputs, *model.graph.outputs), strict=True):
        got = graph_shape(value)
        if tensor.shape is None:
            continue
        if len(got) != len(tensor.shape):
            raise ModelRefused(
                f"'{tensor.name}' has {len(got)} axes in the graph {list(got)}, the spec says {list(tensor.shape)}"
            )
        for axis, (want, have) in enumerate(zip(tensor.shape, got, strict=True)):
            single = isinstance(want, str) and spec.dims[want].min == spec.dims[want].max
            if isinstance(want, str) and isinstance(have, int) and not (single and have == spec.dims[want].max):
                raise ModelRefused(
                    f"'{tensor.name}' axis {axis}: the spec's dim '{want}' is the fixed number {have} in the graph, "
                    f"made by {_producer(value)}",
                    hint=hint,
                )
            if isinstance(want, int) and isinstance(have, int) and want != have:
                raise ModelRefused(f"'{tensor.name}' axis {axis}: the spec says {want}, the graph {have}")


def refuse_random(model: ir.Model) -> None:
    """Raises ModelRefused where the graph draws random numbers: its answers cannot be compared with anything."""
    for graph in model.graphs():
        for node in graph:
            if node.op_type in _RANDOM and node.domain in ("", "ai.onnx"):
                raise ModelRefused(
                    f"{_shown(node)} draws random numbers",
                    hint="pass what it draws as an input, or leave it out of what is served",
                )


def _producer(value: ir.Value) -> str:
    node = value.producer()
    return _shown(node) if node is not None else "the graph's input"


def _shown(node: ir.Node) -> str:
    place = user_line(str(node.metadata_props.get("pkg.torch.onnx.stack_trace", "")))
    return f"node '{node.name}' ({node.op_type}{', ' + place if place else ''})"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keeps the exporter's own chatter off the user's terminal."""
    names = ("torch.onnx", "torch.export", "torch.fx", "onnxscript", "onnx_ir", "torch")
    levels = {name: logging.getLogger(name).level for name in names}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in names:
            logging.getLogger(name).setLevel(logging.CRITICAL)
        try:
            yield
        finally:
            for name, level in levels.items():
                logging.getLogger(name).setLevel(level)
