"""Small ONNX graphs and specs from which the TensorRT tests build real engines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir
from onnx import TensorProto, helper, numpy_helper

from compiler.passes import passes_for
from compiler.spec import ModelSpec, model_spec_from_file

CNN_SPEC = """\
name: cnn
source: {factory: nothing:build}
target: tensorrt-rtx
dims:
  batch: {min: 1, opt: 4, max: 8}
inputs:
  - {name: x, dtype: float32, shape: [batch, 3, 8, 8]}
outputs:
  - {name: y}
"""
ROWS_SPEC = CNN_SPEC.replace("[batch, 3, 8, 8]", "[batch, 16]")


def spec_from(folder: Path, text: str) -> ModelSpec:
    path = folder / "spec.yaml"
    path.write_text(text)
    return model_spec_from_file(path)


def graph(nodes: Sequence[Any], inputs: Any, outputs: Any, constants: dict[str, Any] | None = None) -> Any:
    """Returns a model; inputs and outputs are {name: (onnx type, shape)}, constants numpy arrays."""
    infos = [
        [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in tensors.items()]
        for tensors in (inputs, outputs)
    ]
    weights = [numpy_helper.from_array(np.asarray(v), k) for k, v in (constants or {}).items()]
    proto = helper.make_graph(nodes, "g", *infos, weights)
    return helper.make_model(proto, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)


def node(kind: str, inputs: str, outputs: str, name: str, **attributes: Any) -> Any:
    return helper.make_node(kind, inputs.split(), outputs.split(), name=name, **attributes)


def cnn(half: bool = False, batch: int | str = "batch") -> onnx.ModelProto:
    """A convolution and a ReLU; with `half`, in fp16 between two casts: what a precision pass makes of it."""
    kind = np.float16 if half else np.float32
    weight = np.random.default_rng(0).standard_normal((4, 3, 3, 3)).astype(kind)
    nodes = [
        node("Conv", "x w", "a", "conv", pads=[1, 1, 1, 1]),
        node("Relu", "a", "y", "relu"),
    ]
    if half:
        nodes = [
            node("Cast", "x", "x16", "cast_in", to=TensorProto.FLOAT16),
            node("Conv", "x16 w", "a", "conv", pads=[1, 1, 1, 1]),
            node("Relu", "a", "y16", "relu"),
            node("Cast", "y16", "y", "cast_out", to=TensorProto.FLOAT),
        ]
    shapes = ({"x": (TensorProto.FLOAT, [batch, 3, 8, 8])}, {"y": (TensorProto.FLOAT, [batch, 4, 8, 8])})
    return graph(nodes, *shapes, {"w": weight})


def rows(*nodes: Any, constants: dict[str, Any] | None = None, width: int = 16, kind: int = TensorProto.FLOAT) -> Any:
    """A model from x [batch, 16] to y [batch, width]."""
    return graph(nodes, {"x": (kind, ["batch", 16])}, {"y": (kind, ["batch", width])}, constants)


def passed(proto: onnx.ModelProto, target: str = "tensorrt-rtx") -> onnx_ir.Model:
    """Returns the graph after the target's passes."""
    model = onnx_ir.from_proto(proto)
    for step in passes_for(target):
        model = step.run(model).model
    return model
