"""PyTorch -> ONNX, with every dynamic dim proved to be dynamic. Owns torch.export; passes come later."""

from __future__ import annotations

import contextlib
import logging
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from compiler.cases import Case
from compiler.errors import ModelRefused, where_it_failed
from compiler.reference import flatten_outputs
from compiler.spec import ModelSpec

if TYPE_CHECKING:
    import onnx_ir as ir
    import torch

_SHAPE_OPS = ("view", "_unsafe_view", "reshape", "expand", "unflatten", "arange", "full", "zeros", "ones")


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

    wrapper = _by_name(module, spec)
    args = tuple(torch.from_numpy(case.inputs[t.name].copy()) for t in spec.inputs)
    # min=1: export treats 0 and 1 as special, but a file that serves one request must accept 1.
    dims = {d.name: torch.export.Dim(d.name, min=d.min, max=d.max) for d in spec.dims.values() if d.max > d.min}
    shapes = tuple(
        {axis: dims[s] for axis, s in enumerate(t.shape) if isinstance(s, str) and s in dims} for t in spec.inputs
    )
    with quiet():
        try:
            program = torch.export.export(wrapper, args, dynamic_shapes=(shapes,))
        except Exception as error:
            raise _refusal(error, wrapper, args, spec, case) from error
        try:
            onnx_program = torch.onnx.export(
                program,
                dynamo=True,
                input_names=[t.name for t in spec.inputs],
                output_names=[o.name for o in spec.outputs],
                opset_version=spec.opset,
                optimize=False,
                verbose=False,
            )
        except Exception as error:
            raise ModelRefused(f"the ONNX exporter failed: {_conversion_cause(error)}") from error
    assert onnx_program is not None
    model = onnx_program.model
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
    return Exported(model, f"torch.onnx.export(dynamo=True), torch {torch.__version__}", opset)


def _by_name(module: torch.nn.Module, spec: ModelSpec) -> torch.nn.Module:
    """Wraps the module so that inputs go in by name and outputs come out in the spec's order."""
    import torch

    class NamedModule(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = module

        def forward(self, *args: torch.Tensor) -> tuple[torch.Tensor, ...]:
            inputs = {tensor.name: arg for tensor, arg in zip(spec.inputs, args, strict=True)}
            return flatten_outputs(self.model(**inputs), spec)

    return NamedModule().eval()


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


def _producer(value: ir.Value) -> str:
    node = value.producer()
    if node is None:
        return "the graph's input"
    place = _user_line(str(node.metadata_props.get("pkg.torch.onnx.stack_trace", "")))
    return f"node '{node.name}' ({node.op_type}{', ' + place if place else ''})"


def _refusal(
    error: Exception, wrapper: torch.nn.Module, args: tuple[Any, ...], spec: ModelSpec, case: Case
) -> ModelRefused:
    """Translates an exporter's exception: which dim, which guard, which line."""
    text = str(error)
    guards = re.findall(r"^\s*- (.*)$", text, re.M)
    violated = re.search(r"Constraints violated \(([^)]*)\)", text)
    if violated:
        culprits = _baked_sizes(wrapper, args)
        where = f"; baked in by {'; '.join(culprits)}" if culprits else ""
        readable = "; ".join(_readable_guard(g, spec) for g in guards[:3])
        return ModelRefused(
            f"dim '{violated[1]}' is not dynamic in this model: {readable}{where}",
            hint="use -1 or x.shape[...] in the model where it writes a fixed size, or narrow the dim in the spec",
        )
    if "data-dependent" in text or "GuardOnDataDependent" in type(error).__name__:
        place = _user_line(text)
        return ModelRefused(
            f"the graph depends on the values of a tensor{', at ' + place if place else ''}: "
            "a Python `if` or a size on computed data cannot be exported",
            hint="use torch.where, or torch.cond, instead of a Python branch",
        )
    return ModelRefused(f"torch.export failed at {case.name}: {where_it_failed(error)}")


def _readable_guard(guard: str, spec: ModelSpec) -> str:
    """Rewrites L['args'][0].size()[1] as the tensor's name and axis."""

    def name(match: re.Match[str]) -> str:
        tensor = spec.inputs[int(match[1])]
        return f"{tensor.name}.shape[{match[2]}]"

    text = re.sub(r"L\['args'\]\[(\d+)\]\.size\(\)\[(\d+)\]", name, guard)
    return text.split(" If you're using")[0]


def _baked_sizes(wrapper: torch.nn.Module, args: tuple[Any, ...]) -> list[str]:
    """Traces with all sizes fixed and lists the shape nodes that hold a number, with the model's line."""
    import torch

    try:
        program = torch.export.export(wrapper, args)
    except Exception:
        return []
    found = []
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        operator = str(node.target).removeprefix("aten.").split(".")[0]
        numbers = [n for a in node.args for n in (a if isinstance(a, (list, tuple)) else [a]) if type(n) is int]
        fixed = [n for n in numbers if n > 1]
        place = _user_line(str(node.meta.get("stack_trace", "")))
        if operator in _SHAPE_OPS and fixed and place:
            found.append(
                f"node '{node.name}' with the size{'s'[: len(fixed) > 1]} {', '.join(map(str, fixed))} at {place}"
            )
    return found[:3]


def _user_line(trace: str) -> str:
    """Returns `file:line: code` of the innermost frame in a printed trace, or an empty string."""
    frames = re.findall(r'File "?([^",\n]+)"?(?:, line |:)(\d+)(?:,)? in [^\n]*?(?:, code: |\n\s*)([^\n]+)', trace)
    frames = [f for f in frames if "/compiler/" not in f[0] and "/torch/" not in f[0]]
    if not frames:
        return ""
    file, line, code = frames[-1]
    return f"{file.rsplit('/', 1)[-1]}:{line}: {code.strip()}"


def _conversion_cause(error: BaseException) -> str:
    """Returns the innermost cause's first lines: the exporter wraps one error in three."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"


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
