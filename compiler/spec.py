"""The YAML spec of one model, parsed and validated once into frozen dataclasses.

Dims are written in one place; Triton's max_batch_size, the export's ranges and the parity cases all
derive from them. No torch here: a build that has nothing to do must not import it.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from compiler.calibration_spec import CalibrationSpec, read_calibration
from compiler.engine_options import EngineOptions, read_engine
from compiler.errors import one_of
from compiler.goals import MetricSpec, SloSpec, read_metric, read_slo
from compiler.precision.support import PRECISIONS
from compiler.source_spec import Source, read_source
from compiler.targets.registry import TARGET_NAMES
from compiler.tensors import (
    BATCH_DIM,
    Dim,
    InputSpec,
    OutputSpec,
    check_batch_axis,
    read_dims,
    read_input,
    read_output,
    refuse_duplicates,
)
from compiler.units import ms_from_text
from compiler.yaml_reader import Node, read_yaml

AUTO = "auto"
# 20 is the newest opset whose attention masks run on ONNX Runtime's CPU kernels; see docs/design.md.
DEFAULT_OPSET = 20
SUPPORTED_OPSETS = (18, 20)

_MODEL_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
MODEL_NAMES_ALLOWED = "1 to 128 of the letters a-z A-Z 0-9 _ . -, not starting with . or -"


@dataclass(frozen=True)
class Tolerance:
    """An output passes where |got - want| <= atol + rtol * |want| everywhere, and each row's cosine holds.

    Attributes:
        atol: None where elements are not judged one by one, as in low precisions.
    """

    atol: float | None
    rtol: float
    cosine: float


# fp32: reordered sums of a few thousand terms stay below 1e-5 of the output's scale. Lower precisions are
# judged by direction: an error of 1e-2 is honest at a scale of 15, and wrong at a scale of 0.1.
DEFAULT_TOLERANCES = {
    "fp32": Tolerance(atol=1e-5, rtol=1e-4, cosine=0.99999),
    "fp16": Tolerance(atol=None, rtol=0.0, cosine=0.9999),
    "bf16": Tolerance(atol=None, rtol=0.0, cosine=0.999),
    "int8": Tolerance(atol=None, rtol=0.0, cosine=0.99),
    "int8_dynamic": Tolerance(atol=None, rtol=0.0, cosine=0.99),
}
# Where the tool chooses the precision, nobody has agreed to lose more than this.
AUTO_COSINE = 0.999


@dataclass(frozen=True)
class Serving:
    """How Triton serves the model.

    Attributes:
        max_queue_delay_us: how long a request may wait for batch mates, in microseconds.
        instances: how many copies run side by side.
        threads: intra-op threads of each instance; 0 leaves the choice to the runtime (all cores).
        ready_within_s: how long its start may take; `compile serve` measures it.
    """

    max_queue_delay_us: int = 0
    instances: int = 1
    threads: int = 0
    ready_within_s: float | None = None


@dataclass(frozen=True)
class ModelSpec:
    """Everything `compile build` needs to know about one model."""

    path: Path
    name: str
    source: Source
    dims: dict[str, Dim]
    inputs: tuple[InputSpec, ...]
    outputs: tuple[OutputSpec, ...]
    target: str
    precision: str
    opset: int
    tolerance: dict[str, float]
    serving: Serving
    require_fusion: dict[str, int]
    calibration: CalibrationSpec | None
    engine: EngineOptions
    metric: MetricSpec | None
    slo: SloSpec | None
    root: Node = field(compare=False, repr=False)

    @property
    def document(self) -> dict[str, Any]:
        """The spec as plain data."""
        document: dict[str, Any] = self.root.plain()
        return document

    @property
    def tensors(self) -> tuple[InputSpec | OutputSpec, ...]:
        """All inputs, then all outputs."""
        return (*self.inputs, *self.outputs)

    @property
    def max_batch_size(self) -> int:
        """Triton's max_batch_size: the batch dim's max, or 0 where there is no such dim."""
        batch = self.dims.get(BATCH_DIM)
        return batch.max if batch else 0

    def tolerance_for(self, precision: str) -> Tolerance:
        """Returns the limits for a precision: its defaults, and what the spec says instead.

        With a metric, lower precisions are judged by that alone, unless the spec names a tolerance too. In fp32 a
        difference is a fault of the compiler, whatever the metric says.
        """
        default = DEFAULT_TOLERANCES[precision]
        if self.metric and precision != "fp32":
            default = replace(default, cosine=-1.0)
        elif self.precision == AUTO:
            default = replace(default, cosine=max(default.cosine, AUTO_COSINE))
        return replace(default, **self.tolerance)

    def agreement_for(self, precision: str) -> float:
        """Returns the cosine that a conversion holds nodes back for; with a metric the precision's own default."""
        default = DEFAULT_TOLERANCES[precision].cosine if self.metric else self.tolerance_for(precision).cosine
        return self.tolerance.get("cosine", default)

    def at(self, *keys: str) -> Node:
        """Returns the node under the keys, to name its line in an error found later."""
        node = self.root
        for key in keys:
            node = node.value[key]
        return node


def model_spec_from_file(path: Path) -> ModelSpec:
    """Reads and validates a model spec.

    Raises:
        SpecError: with `file:line`, what was seen and what is allowed.
    """
    return model_spec_from_node(read_yaml(path), path)


def model_spec_from_node(root: Node, path: Path) -> ModelSpec:
    """Validates a model spec that was already read from `path`."""
    table = root.table(
        "the spec",
        required=("name", "source", "inputs", "outputs"),
        optional=(
            "dims",
            "target",
            "precision",
            "opset",
            "tolerance",
            "serving",
            "require_fusion",
            "calibration",
            "engine",
            "metric",
            "slo",
        ),
    )
    dims = read_dims(table)
    inputs = tuple(read_input(node, dims) for node in table["inputs"].items("inputs"))
    outputs = tuple(read_output(node, dims) for node in table["outputs"].items("outputs"))
    if not inputs or not outputs:
        root.fail("a model needs at least one input and one output")
    refuse_duplicates(table["inputs"], [i.name for i in inputs], "input")
    refuse_duplicates(table["outputs"], [o.name for o in outputs], "output")
    for index, output in enumerate(outputs):
        if output.name in {i.name for i in inputs}:
            table["outputs"].value[index].fail(
                f"an input and an output are both named '{output.name}'; in a graph a name stands for one value",
                hint=f"call the output otherwise, such as {output.name}_out: a tuple's outputs may have any names",
            )
    used = {d for i in inputs for d in i.shape if isinstance(d, str)}
    for name in dims:
        if name not in used:
            table["dims"].value[name].fail(f"no input has the dim '{name}'; dims of the inputs: {one_of(used)}")
    check_batch_axis(table, dims, (*inputs, *outputs))
    precision_node, target_node, opset_node = table.get("precision"), table.get("target"), table.get("opset")
    required = table.get("require_fusion")
    target = target_node.choice("target", (*TARGET_NAMES, AUTO)) if target_node else TARGET_NAMES[0]
    opset = opset_node.integer("opset", 1, 99) if opset_node else DEFAULT_OPSET
    if opset_node and opset not in SUPPORTED_OPSETS:
        opset_node.fail(f"opset is {opset}; allowed: {', '.join(map(str, SUPPORTED_OPSETS))}")
    return ModelSpec(
        path=path,
        name=model_name(table["name"]),
        source=read_source(table["source"]),
        dims=dims,
        inputs=inputs,
        outputs=outputs,
        target=target,
        precision=precision_node.choice("precision", (*PRECISIONS, AUTO)) if precision_node else PRECISIONS[0],
        opset=opset,
        tolerance=_tolerance(table.get("tolerance")),
        serving=read_serving(table.get("serving")),
        require_fusion={
            name: child.integer(f"require_fusion.{name}", 1)
            for name, child in (required.mapping("require_fusion").items() if required else ())
        },
        calibration=read_calibration(table.get("calibration")),
        engine=read_engine(table.get("engine"), target),
        metric=read_metric(table.get("metric")),
        slo=read_slo(table.get("slo")),
        root=root,
    )


def is_model_name(name: str) -> bool:
    """Whether a name is safe as a folder and one that Triton's bundled server can load."""
    return bool(_MODEL_NAME.fullmatch(name)) and name.strip(".") != ""


def model_name(node: Node) -> str:
    """Reads a model's name.

    A space makes the server's Python stub abort and the load hang; a path part would leave the repository.
    """
    name = node.string("name")
    if not is_model_name(name):
        node.fail(f"name is {name!r}; allowed: {MODEL_NAMES_ALLOWED}")
    return name


def read_serving(node: Node | None) -> Serving:
    """Reads the serving options."""
    if node is None:
        return Serving()
    table = node.table("serving", optional=("max_queue_delay_us", "instances", "threads", "ready_within"))
    delay, instances, threads = (table.get(k) for k in ("max_queue_delay_us", "instances", "threads"))
    ready = table.get("ready_within")
    ready_ms = ms_from_text(str(ready.value)) if ready else None
    if ready and not ready_ms:
        ready.fail(f"serving.ready_within is {ready.value!r}; allowed: a time such as 10s or 500ms")
    return Serving(
        max_queue_delay_us=delay.integer("serving.max_queue_delay_us", 0, 60_000_000) if delay else 0,
        instances=instances.integer("serving.instances", 1, 1024) if instances else 1,
        threads=threads.integer("serving.threads", 0, 1024) if threads else 0,
        ready_within_s=ready_ms / 1000 if ready_ms else None,
    )


def _tolerance(node: Node | None) -> dict[str, float]:
    if node is None:
        return {}
    table = node.table("tolerance", optional=("atol", "rtol", "cosine"))
    given = {key: child for key in ("atol", "rtol", "cosine") if (child := table.get(key))}
    low, high = {"cosine": -1.0}, {"cosine": 1.0}
    return {
        key: child.number(f"tolerance.{key}", low.get(key, 0.0), high.get(key, math.inf))
        for key, child in given.items()
    }
