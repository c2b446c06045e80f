"""A foreign ONNX graph in the spec's terms: inputs and outputs in the spec's order, dims under the spec's names."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from compiler.export import check_interface, refuse_random
from compiler.spec import ModelSpec

if TYPE_CHECKING:
    import onnx_ir as ir

_NAME = re.compile(r"[A-Za-z_]\w*")


def graph_for_spec(proto: Any, spec: ModelSpec) -> tuple[ir.Model, tuple[str, ...]]:
    """Converts the protobuf, which holds all its data, and keeps what the spec names.

    Returns:
        The graph, and what was changed, for the report.

    Raises:
        ModelRefused: a dim of the spec is a fixed number in the file; the message has both.
    """
    import onnx_ir

    model = onnx_ir.from_proto(proto)
    notes = [*_keep_inputs(model, spec), *_keep_outputs(model, spec)]
    _rename_dims(model, spec)
    check_interface(
        model, spec, hint="export the file again with this axis dynamic, or write the file's number into the spec"
    )
    refuse_random(model)
    return model, tuple(notes)


def _keep_inputs(model: ir.Model, spec: ModelSpec) -> list[str]:
    by_name = {v.name: v for v in model.graph.inputs}
    constant = [n for n in by_name if n in model.graph.initializers]
    model.graph.inputs[:] = [by_name[t.name] for t in spec.inputs]
    # Before IR version 4 every weight was listed as an input too, and nobody means to send it.
    return [f"note: {len(constant)} weights were listed as inputs too; they are constants now"] if constant else []


def _keep_outputs(model: ir.Model, spec: ModelSpec) -> list[str]:
    by_name = {v.name: v for v in model.graph.outputs}
    wanted = [o.name for o in spec.outputs]
    model.graph.outputs[:] = [by_name[name] for name in wanted]
    left = [str(n) for n in by_name if n not in wanted]
    return [f"note: outputs that the spec does not name were left out: {', '.join(left)}"] if left else []


def _rename_dims(model: ir.Model, spec: ModelSpec) -> None:
    """Gives each dim the spec's name; a name of the file's that means another dim there is set aside."""
    import onnx_ir

    names: dict[str, str] = {}
    for tensor, value in zip(spec.inputs, model.graph.inputs, strict=True):
        for axis, want in enumerate(tensor.shape):
            seen = value.shape[axis] if value.shape is not None and len(value.shape) == len(tensor.shape) else None
            if isinstance(want, str) and isinstance(seen, onnx_ir.SymbolicDim) and seen.value:
                names.setdefault(seen.value, want)

    def renamed(match: re.Match[str]) -> str:
        text = match.group()
        return names.get(text, f"file_{text}" if text in spec.dims else text)

    for graph in model.graphs():
        values = [*graph.inputs, *graph.outputs, *(v for node in graph for v in node.outputs)]
        for value in {id(v): v for v in values}.values():
            if value.shape is None:
                continue
            # PaddlePaddle writes -1 for a size that is not known.
            shape = [
                (d if d >= 0 else None) if isinstance(d, int) else _NAME.sub(renamed, d.value) if d.value else None
                for d in value.shape
            ]
            value.shape = onnx_ir.Shape(shape)
    for wanted, value in zip(spec.tensors, (*model.graph.inputs, *model.graph.outputs), strict=True):
        _take_shape(wanted.shape, value)


def _take_shape(wanted: tuple[int | str, ...] | None, value: ir.Value) -> None:
    """Fills in what the file leaves open from the spec, which every parity case then proves."""
    import onnx_ir

    # A shape is always there: onnx's checker refuses inputs and outputs without one.
    if wanted is None or value.shape is None or len(value.shape) != len(wanted):
        return
    value.shape = onnx_ir.Shape([s if isinstance(s, int) else w for s, w in zip(value.shape, wanted, strict=True)])
