"""What held nodes cost in speed: timed in turn where this machine can run both forms, else their share of the work."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compiler.dtypes import AnyArray
from compiler.precision.graph import constant
from compiler.precision.observe import shapes_of
from compiler.precision.result import Share
from compiler.targets.onnxruntime import MODEL_FILE, write_onnx

if TYPE_CHECKING:
    import onnx_ir as ir

Sample = Mapping[str, AnyArray]
Call = Callable[[], Any]

ROUNDS, WARMUP = 9, 2


@dataclass(frozen=True)
class Comparison:
    """Two calls, timed in turn.

    Attributes:
        first_ms, second_ms: medians.
        ratio: first / second, the median of the rounds.
        low, high: the quartiles of the rounds.
    """

    first_ms: float
    second_ms: float
    ratio: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.ratio:.2f}x (half of the rounds within {self.low:.2f}-{self.high:.2f})"


def node_work(model: ir.Model, sample: Sample) -> dict[str, tuple[int, int]]:
    """Returns each node's floating-point operations and bytes moved on a sample, by the node's name.

    Args:
        model: a prepared graph that ONNX Runtime can run.
        sample: one of its inputs.
    """
    from onnx_ir import TensorType

    from compiler.graph_stats import node_flops

    inner = [v for node in model.graph for v in node.outputs if v.name and isinstance(v.type, TensorType | None)]
    shapes = shapes_of(model, [str(v.name) for v in inner], sample)
    shapes |= {n: np.shape(a) for n, a in sample.items()}
    for name, value in model.graph.initializers.items():
        if (array := constant(value)) is not None:
            shapes[name] = array.shape

    def num_bytes(value: ir.Value) -> float:
        return prod(shapes[value.name or ""]) * (value.dtype.itemsize if value.dtype else 4)

    work = {}
    for node in model.graph:
        inputs = [v for v in node.inputs if v is not None and v.name in shapes]
        outputs = [v for v in node.outputs if v.name in shapes]
        flops = (
            node_flops(node, [shapes[v.name or ""] for v in inputs], shapes[outputs[0].name or ""]) if outputs else 0
        )
        work[node.name or ""] = flops, int(sum(map(num_bytes, (*inputs, *outputs))))
    return work


def shares(work: Mapping[str, tuple[int, int]]) -> dict[str, Share]:
    """Returns each node's part of the sums."""
    flops, moved = (max(1, sum(w[i] for w in work.values())) for i in (0, 1))
    return {name: Share(f / flops, b / moved) for name, (f, b) in work.items()}


def compare(first: Call, second: Call) -> Comparison:
    """Times two calls in turn, so that what else the machine does falls on both."""
    for _ in range(WARMUP):
        first(), second()
    pairs = [(_ms(first), _ms(second)) for _ in range(ROUNDS)]
    ratios = [a / b for a, b in pairs]
    low, _, high = statistics.quantiles(ratios, n=4)
    one, other = (statistics.median(column) for column in zip(*pairs, strict=True))
    return Comparison(one, other, statistics.median(ratios), low, high)


def compare_graphs(first: ir.Model, second: ir.Model, target: str, sample: Sample) -> Comparison | None:
    """Times two forms of a graph on a target's runtime; None where this machine cannot run one."""
    opener = {"onnxruntime": _onnxruntime_call, "openvino": _openvino_call}.get(target)
    if opener is None:
        return None
    with tempfile.TemporaryDirectory(prefix="modelkiln-costs-") as work:
        calls: list[Call] = []
        for name, model in (("first", first), ("second", second)):
            folder = Path(work, name)
            folder.mkdir()
            write_onnx(model.clone(), folder)
            try:
                call = opener(folder / MODEL_FILE, sample)
            except Exception:
                # What cannot be timed is estimated; whether the file that ships runs is parity's to say.
                return None
            if call is None:
                return None
            calls.append(call)
    return compare(*calls)


def _onnxruntime_call(file: Path, sample: Sample) -> Call | None:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    # Threads that spin on after a call would take the other form's cores.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = ort.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    feeds = {i.name: np.asarray(sample[i.name]) for i in session.get_inputs()}
    return lambda: session.run(None, feeds)


def _openvino_call(file: Path, sample: Sample) -> Call | None:
    try:
        import openvino
    except ModuleNotFoundError:
        return None
    from compiler.targets.openvino import HINT, inference_precision, properties

    # What is held in int8's graph computes as it will be served.
    compiled = openvino.Core().compile_model(str(file), "CPU", properties(0, {HINT: inference_precision("int8")}))
    request = compiled.create_infer_request()
    feeds = {i.get_any_name(): np.asarray(sample[i.get_any_name()]) for i in compiled.inputs}
    return lambda: request.infer(feeds)


def _ms(call: Call) -> float:
    started = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - started) / 1e6
