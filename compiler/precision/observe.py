"""Running a graph on samples, with any of its inner values as outputs. No judgement.

Nothing is written to disk and the weights are never serialised: a session gets the graph without its large constants,
and they are fed from the arrays that the graph holds. A search opens many graphs that share their weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from compiler.dtypes import AnyArray
from compiler.errors import ModelRefused
from compiler.targets.onnxruntime import IR_VERSION

if TYPE_CHECKING:
    import onnx_ir as ir

Samples = Sequence[Mapping[str, AnyArray]]
# Inner values are fetched in groups that should stay below this: all of them at once would not fit for a large batch.
GROUP_BYTES = 1 << 30
# Constants from this size on are fed; smaller ones (shapes, axes, scales) must be known when a session opens.
_FED_BYTES = 1 << 12


def run_outputs(model: ir.Model, samples: Samples) -> list[dict[str, AnyArray]]:
    """Returns the graph's outputs for each sample, computed by ONNX Runtime without any rewriting of its own."""
    return list(each_output(model, samples))


def each_output(model: ir.Model, samples: Samples) -> Iterator[dict[str, AnyArray]]:
    """Yields what `run_outputs` returns; a sample is run when it is asked for."""
    return _run(model, [_name(v) for v in model.graph.outputs], samples)


def observe(
    model: ir.Model, names: Sequence[str], samples: Samples, group_bytes: int = GROUP_BYTES
) -> Iterator[dict[str, AnyArray]]:
    """Yields the named inner values, a group of values for one sample at a time.

    Args:
        model: any graph that ONNX Runtime can run; it is not changed.
        names: values of the main graph; what a sample gives as an input is yielded as it is.
        samples: arrays by input name.
        group_bytes: what one group should need at most.

    Raises:
        ModelRefused: ONNX Runtime cannot load or run the graph.
    """
    inputs = {_name(v) for v in model.graph.inputs}
    for sample in samples:
        given = {n: sample[n] for n in names if n in inputs and n in sample}
        if given:
            yield given
    inner = [n for n in names if n not in inputs]
    if not inner or not samples:
        return
    largest = max(samples, key=_num_elements)
    for group in _groups(inner, _bytes_of(model, inner, largest), group_bytes):
        yield from _run(model, group, samples)


def shapes_of(model: ir.Model, names: Sequence[str], sample: Mapping[str, AnyArray]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes that inner values have on a sample; the values themselves stay inside."""
    from onnx_ir import DataType

    from compiler.precision.graph import add_node

    copy = model.clone()
    values = _values(copy)
    nodes = {n: add_node("Shape", [values[n]], f"{n}__shape", DataType.INT64, None) for n in names}
    copy.graph.extend(nodes.values())
    outputs = {n: node.outputs[0] for n, node in nodes.items()}
    copy.graph.outputs.extend(outputs.values())
    [found] = _run(copy, [_name(v) for v in outputs.values()], [sample])
    return {n: tuple(int(d) for d in found[_name(v)]) for n, v in outputs.items()}


def _bytes_of(model: ir.Model, names: Sequence[str], sample: Mapping[str, AnyArray]) -> dict[str, int]:
    values = _values(model)
    sizes = {n: max(1, int(getattr(values[n].dtype, "itemsize", 8))) for n in names}
    return {n: prod(shape) * sizes[n] for n, shape in shapes_of(model, names, sample).items()}


def _groups(names: Sequence[str], need: Mapping[str, float], limit: float) -> Iterator[list[str]]:
    group: list[str] = []
    total = 0.0
    for name in names:
        if group and total + need[name] > limit:
            yield group
            group, total = [], 0.0
        group.append(name)
        total += need[name]
    if group:
        yield group


def _run(model: ir.Model, names: Sequence[str], samples: Samples) -> Iterator[dict[str, AnyArray]]:
    """Runs a copy that computes the named values and nothing else."""
    from onnx_ir.passes.common import RemoveUnusedNodesPass

    copy = model.clone()
    values = _values(copy)
    wanted = [_name(v) for v in copy.graph.inputs]
    copy.graph.outputs[:] = [values[n] for n in names]
    RemoveUnusedNodesPass()(copy)
    session, weights = _open(copy)
    for sample in samples:
        missing = sorted(set(wanted) - set(sample))
        if missing:
            raise ModelRefused(
                f"a calibration sample lacks the input '{missing[0]}'; it has {', '.join(sorted(sample))}",
                hint=f"give an array for each of: {', '.join(wanted)}",
            )
        try:
            outputs = session.run(list(names), {**weights, **{n: np.asarray(sample[n]) for n in wanted}})
        except Exception as error:
            shapes = ", ".join(f"{n} {list(np.shape(sample[n]))}" for n in wanted)
            raise ModelRefused(f"the graph fails at {shapes}: {_short(error)}") from error
        yield dict(zip(names, outputs, strict=True))


def _open(graph_copy: ir.Model) -> tuple[Any, dict[str, Any]]:
    """Opens a session on a graph that may be changed; returns it with the constants that it must be fed."""
    import onnx_ir
    import onnxruntime as ort

    graph_copy.ir_version = IR_VERSION
    graph, weights = graph_copy.graph, {}
    outputs = set(graph.outputs)
    for name, value in list(graph.initializers.items()):
        tensor = value.const_value
        if tensor is None or tensor.nbytes < _FED_BYTES or value in outputs or value.is_graph_input():
            continue
        if (fed := _fed(tensor)) is not None:
            weights[name] = fed
            del graph.initializers[name]
            value.const_value, value.shape = None, tensor.shape
            value.type = onnx_ir.TensorType(tensor.dtype)
            graph.inputs.append(value)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    text = onnx_ir.to_proto(graph_copy).SerializeToString()
    try:
        return ort.InferenceSession(text, options, providers=["CPUExecutionProvider"]), weights
    except Exception as error:
        raise ModelRefused(f"ONNX Runtime {ort.__version__} cannot load the graph: {_short(error)}") from error


def _fed(tensor: ir.TensorProtocol) -> Any | None:
    """Returns a constant as `session.run` takes it, or None for a type that it does not take."""
    import onnxruntime as ort
    from onnx_ir import DataType

    if tensor.dtype == DataType.BFLOAT16:
        bits = np.ascontiguousarray(tensor.numpy()).view(np.uint16)
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, int(DataType.BFLOAT16))
    array = np.asarray(tensor.numpy())
    return array if array.dtype.kind in "fiub" and array.dtype.isnative else None


def _values(model: ir.Model) -> dict[str, ir.Value]:
    values = {_name(v): v for node in model.graph for v in node.outputs if v.name}
    # An output that is an input or a constant as well stays as it is.
    values.update({_name(v): v for v in model.graph.outputs})
    return values


def _num_elements(sample: Mapping[str, AnyArray]) -> int:
    return sum(int(np.size(a)) for a in sample.values())


def _name(value: ir.Value) -> str:
    assert value.name, "every value has a name after prepare()"
    return str(value.name)


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:400]
