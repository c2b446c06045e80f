"""An archive of torch.export as the source. Opening one can run code, so it needs --trust-pickle (docs/design.md)."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compiler.errors import ModelRefused, did_you_mean, one_of, where_it_failed
from compiler.export import quiet
from compiler.files import resolve_file
from compiler.source_spec import ExportedProgramSource
from compiler.sources.base import OpenedSource, opened_module, trust_note
from compiler.spec import ModelSpec
from compiler.tensors import Dim, InputSpec

if TYPE_CHECKING:
    import torch


def archive_files(spec: ModelSpec, source: ExportedProgramSource) -> dict[str, Path]:
    """Returns the archive, by the name that the spec gives it."""
    name = source.exported_program
    return {name: resolve_file(spec.at("source", "exported_program"), name, spec.path.parent)}


def open_exported_program(spec: ModelSpec, source: ExportedProgramSource, trust_pickle: bool) -> OpenedSource:
    """Loads the archive; the spec's inputs are matched by name and its dims with those of the program.

    Raises:
        SpecError: an input that the program does not have, or one that the spec lacks.
        ModelRefused: the archive is not trusted or damaged, or a dim of the spec goes beyond the program's.
    """
    (name, path), *_ = archive_files(spec, source).items()
    if not trust_pickle:
        raise ModelRefused(
            f"source.exported_program {name}: opening an archive of torch.export can run code that is in it",
            hint="if you wrote it yourself: compile build --trust-pickle; an .onnx file needs no trust",
        )
    program = _load(path, name)
    inputs = _program_inputs(program, name)
    _check_inputs(inputs, spec)
    _check_dims(program, inputs, spec)
    return opened_module(
        _callable_by_name(program, list(inputs)),
        spec,
        name,
        notes=(trust_note(name),),
        trusted=(name,),
    )


def _load(path: Path, name: str) -> torch.export.ExportedProgram:
    import torch

    if not zipfile.is_zipfile(path):
        raise ModelRefused(f"source.exported_program {name} is not an archive of torch.export: it is no zip file")
    try:
        with quiet():
            program = torch.export.load(path)
    except Exception as error:
        raise ModelRefused(
            f"source.exported_program {name} is damaged, or was saved by another version of torch than "
            f"{torch.__version__}: {where_it_failed(error)}"
        ) from error
    return program


def _program_inputs(program: torch.export.ExportedProgram, name: str) -> dict[str, Any]:
    """Returns the program's inputs: what stands for each tensor in the trace, by name."""
    import torch

    values = {n.name: n.meta.get("val") for n in program.graph.nodes if n.op == "placeholder"}
    kind = torch.export.graph_signature.InputKind.USER_INPUT
    names = [s.arg.name for s in program.graph_signature.input_specs if s.kind == kind]
    positional, keyword = program.call_spec.in_spec.children()
    if any(not leaf.is_leaf() for leaf in (*positional.children(), *keyword.children())):
        raise ModelRefused(f"source.exported_program {name} takes lists or dicts; only tensors have names in Triton")
    inputs = {name: values.get(name) for name in names}
    for input_name, value in inputs.items():
        if not isinstance(value, torch.Tensor):
            raise ModelRefused(f"source.exported_program {name}: input '{input_name}' is not a tensor")
    return inputs


def _check_inputs(inputs: dict[str, Any], spec: ModelSpec) -> None:
    nodes = spec.at("inputs")
    for index, tensor in enumerate(spec.inputs):
        if tensor.name not in inputs:
            nodes.value[index].fail(
                f"the program has no input '{tensor.name}'{did_you_mean(tensor.name, inputs)}; "
                f"its inputs: {one_of(inputs)}"
            )
        seen = str(inputs[tensor.name].dtype).removeprefix("torch.")
        if seen != tensor.dtype.name:
            nodes.value[index].fail(
                f"input '{tensor.name}' is {seen} in the program, the spec says {tensor.dtype.name}"
            )
    given = [t.name for t in spec.inputs]
    for name in inputs:
        if name not in given:
            nodes.fail(f"the program needs the input '{name}', which the spec lacks; it has: {one_of(given)}")


def _check_dims(program: torch.export.ExportedProgram, inputs: dict[str, Any], spec: ModelSpec) -> None:
    """Compares the sizes that the program was exported for with those that the spec promises."""
    symbols: dict[str, str] = {}
    for tensor in spec.inputs:
        seen = inputs[tensor.name].shape
        if len(seen) != len(tensor.shape):
            raise ModelRefused(
                f"'{tensor.name}' has {len(seen)} axes in the program, the spec says {list(tensor.shape)}"
            )
        for axis, (want, have) in enumerate(zip(tensor.shape, seen, strict=True)):
            if isinstance(have, int):
                _check_fixed(tensor, axis, want, have, spec)
            elif isinstance(want, str):
                symbol = have.node.expr
                _check_range(tensor, axis, spec.dims[want], program.range_constraints.get(symbol))
                other = symbols.setdefault(str(symbol), want)
                if other != want:
                    raise ModelRefused(
                        f"the dims '{other}' and '{want}' are one dim in the program (axis {axis} of '{tensor.name}')",
                        hint="use one name for both in the spec, or export the program with two Dims",
                    )


def _check_fixed(tensor: InputSpec, axis: int, want: int | str, have: int, spec: ModelSpec) -> None:
    if isinstance(want, str):
        dim = spec.dims[want]
        if dim.min == dim.max == have:
            return
        raise ModelRefused(
            f"dim '{want}' is the fixed number {have} in the program (axis {axis} of '{tensor.name}')",
            hint=f"export it with dynamic_shapes and {_dim_code(dim)}",
        )
    if want != have:
        raise ModelRefused(f"'{tensor.name}' axis {axis}: the spec says {want}, the program {have}")


def _check_range(tensor: InputSpec, axis: int, dim: Dim, found: Any) -> None:
    if found is None:
        return
    if not (found.lower <= dim.min and dim.max <= found.upper):
        upper = found.upper if str(found.upper).isdigit() else "any size"
        raise ModelRefused(
            f"dim '{dim.name}' is {dim.min}..{dim.max} in the spec, but the program was exported for "
            f"{found.lower} to {upper} (axis {axis} of '{tensor.name}')",
            hint=f"export it with {_dim_code(dim)}, or narrow the dim in the spec",
        )


def _dim_code(dim: Dim) -> str:
    return f"torch.export.Dim('{dim.name}', min={dim.min}, max={dim.max})"


def _callable_by_name(program: torch.export.ExportedProgram, names: list[str]) -> torch.nn.Module:
    """Wraps the program's module, which takes some inputs by position only, so that all go in by name."""
    import torch

    inner = program.module()
    positional, keyword = program.call_spec.in_spec.children()
    num_positional = len(positional.children())
    # A keyword's name in the trace may differ from the one that the caller uses.
    keywords = dict(zip(names[num_positional:], keyword.context, strict=True))

    class ProgramModule(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, **inputs: torch.Tensor) -> Any:
            args = [inputs[n] for n in names[:num_positional]]
            return self.inner(*args, **{key: inputs[n] for n, key in keywords.items()})

        def train(self, mode: bool = True) -> ProgramModule:
            return self  # an exported program has the mode it was exported in, and refuses to change it

    return ProgramModule()
