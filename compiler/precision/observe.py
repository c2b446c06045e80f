"""Running a graph on samples, with any of its inner values as outputs. No judgement."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from compiler.dtypes import AnyArray
from compiler.errors import ModelRefused

if TYPE_CHECKING:
    import onnx_ir as ir

Samples = Sequence[Mapping[str, AnyArray]]
# Inner values are fetched in groups that should stay below this: all of them at once would not fit for a large batch.
GROUP_BYTES = 1 << 30


def run_outputs(model: ir.Model, samples: Samples) -> list[dict[str, AnyArray]]:
    """Returns the graph's outputs for each sample, computed by ONNX Runtime without any rewriting of its own."""
    names = [_name(v) for v in model.graph.outputs]
    return [outputs for _, outputs in _run(model, names, samples)]


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
    smallest = min(samples, key=_num_elements)
    [(_, measured)] = _run(model, inner, [smallest])
    growth = max(_num_elements(s) for s in samples) / max(1, _num_elements(smallest))
    # The square: attention scores grow with the square of the length.
    need = {n: measured[n].nbytes * growth * growth for n in inner}
    for group in _groups(inner, need, group_bytes):
        for _, outputs in _run(model, group, samples):
            yield outputs


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


def _run(
    model: ir.Model, names: Sequence[str], samples: Samples
) -> Iterator[tuple[Mapping[str, AnyArray], dict[str, AnyArray]]]:
    """Runs a copy whose outputs are the named values."""
    import onnxruntime as ort

    from compiler.targets.onnxruntime import MODEL_FILE, write_onnx

    copy = model.clone()
    values = {_name(v): v for node in copy.graph for v in node.outputs}
    # An output that is an input or a constant as well stays as it is.
    values.update({_name(v): v for v in copy.graph.outputs})
    copy.graph.outputs[:] = [values[n] for n in names]
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    with tempfile.TemporaryDirectory(prefix="modelkiln-observe-") as folder:
        write_onnx(copy, Path(folder))
        try:
            session = ort.InferenceSession(str(Path(folder, MODEL_FILE)), options, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise ModelRefused(f"ONNX Runtime {ort.__version__} cannot load the graph: {_short(error)}") from error
        wanted = [i.name for i in session.get_inputs()]
        for sample in samples:
            missing = sorted(set(wanted) - set(sample))
            if missing:
                raise ModelRefused(
                    f"a calibration sample lacks the input '{missing[0]}'; it has {', '.join(sorted(sample))}",
                    hint=f"give an array for each of: {', '.join(wanted)}",
                )
            try:
                outputs = session.run(list(names), {n: np.asarray(sample[n]) for n in wanted})
            except Exception as error:
                shapes = ", ".join(f"{n} {list(np.shape(sample[n]))}" for n in wanted)
                raise ModelRefused(f"the graph fails at {shapes}: {_short(error)}") from error
            yield sample, dict(zip(names, outputs, strict=True))


def _num_elements(sample: Mapping[str, AnyArray]) -> int:
    return sum(int(np.size(a)) for a in sample.values())


def _name(value: ir.Value) -> str:
    assert value.name, "every value has a name after prepare()"
    return str(value.name)


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:400]
