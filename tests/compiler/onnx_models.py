"""Small ONNX files for the tests of ONNX sources: y = x @ w + b, with its weights inside or in a file beside it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

SPEC = """
name: linear
source: {onnx: model.onnx}
dims:
  batch: {min: 1, opt: 4, max: 8}
inputs:
  - {name: x, dtype: float32, shape: [batch, 16]}
outputs:
  - {name: y, dtype: float32}
"""

WEIGHT = np.random.default_rng(0).standard_normal((16, 3)).astype(np.float32)
BIAS = np.array([1, 2, 3], np.float32)


def tensor(name: str, shape: list, element_type: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, element_type, shape)


def model(
    nodes: list | None = None,
    inputs: list | None = None,
    outputs: list | None = None,
    initializers: list | None = None,
    opset: int = 20,
    **more: object,
) -> onnx.ModelProto:
    """Returns y = x @ w + b where nothing else is given."""
    graph = helper.make_graph(
        nodes or [helper.make_node("MatMul", ["x", "w"], ["h"]), helper.make_node("Add", ["h", "b"], ["y"])],
        "g",
        inputs or [tensor("x", ["N", 16])],
        outputs or [tensor("y", ["N", 3])],
        initializers
        if initializers is not None
        else [numpy_helper.from_array(WEIGHT, "w"), numpy_helper.from_array(BIAS, "b")],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], **more)
    made.ir_version = 8
    return made


def write(folder: Path, proto: onnx.ModelProto, spec: str = SPEC) -> Path:
    """Writes `model.onnx` and a spec beside it; returns the spec's path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.onnx").write_bytes(proto.SerializeToString())
    (folder / "spec.yaml").write_text(spec.lstrip())
    return folder / "spec.yaml"


def make_external(item: TensorProto, **entries: object) -> None:
    """Turns a tensor into external data with exactly these entries."""
    for field in ("raw_data", "float_data", "int64_data"):
        item.ClearField(field)
    item.data_location = TensorProto.EXTERNAL
    for key, value in entries.items():
        item.external_data.add(key=key, value=str(value))


def external_model(**entries: object) -> onnx.ModelProto:
    """Returns the linear model with `w` external: by default 192 bytes at the start of `w.bin`."""
    made = model()
    make_external(made.graph.initializer[0], **{"location": "w.bin", "offset": 0, "length": WEIGHT.nbytes, **entries})
    return made
