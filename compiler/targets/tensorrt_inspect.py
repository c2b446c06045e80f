"""Reading back what was obtained: the precision of each layer, and whether wide integers were kept.

The engine's own inspector needs a GPU to load the engine. Without one the types of the parsed network are read: the
network is strongly typed, so the builder may fuse its layers but not change their types.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from compiler.errors import ModelRefused

if TYPE_CHECKING:
    import onnx_ir as ir

NETWORK, INSPECTOR = "network", "engine inspector"

_INT32 = (-(2**31), 2**31 - 1)
# How the inspector writes a type: `Half` in newer versions, `Row major linear FP16 format` in older ones.
_INSPECTED = (
    ("bf16", r"bf(loat)?16"),
    ("fp16", r"half|fp16|float16"),
    ("fp32", r"float|fp32"),
    ("fp8", r"fp8"),
    ("int8", r"int8(?!\w)"),
    ("int4", r"int4"),
    ("int64", r"int64"),
    ("int32", r"int32"),
    ("bool", r"bool"),
)


def precisions_of_network(trt: Any, network: Any) -> dict[str, int]:
    """Counts the layers by the type of their first output; constants and casts compute nothing and do not count."""
    names = _type_names(trt)
    found: Counter[str] = Counter()
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if layer.type not in (trt.LayerType.CONSTANT, trt.LayerType.CAST) and layer.num_outputs:
            tensor = layer.get_output(0)
            found[names.get(tensor.dtype, str(tensor.dtype))] += 1
    return dict(sorted(found.items()))


def precisions_of_inspection(text: str) -> dict[str, int]:
    """Counts layers by type in the JSON of an engine inspector; empty where it holds layer names only."""
    found: Counter[str] = Counter()
    for layer in json.loads(text).get("Layers", ()):
        outputs = layer.get("Outputs", ()) if isinstance(layer, dict) else ()
        types = [_inspected_type(str(o.get("Format/Datatype", ""))) for o in outputs if isinstance(o, dict)]
        if types:
            found[types[0]] += 1
    return dict(sorted(found.items()))


def _inspected_type(text: str) -> str:
    for name, pattern in _INSPECTED:
        if re.search(pattern, text, re.IGNORECASE):
            return name
    return text or "unknown"


def refuse_lost_precision(asked: str, layers: Mapping[str, int], read_from: str) -> None:
    """Raises ModelRefused where a precision was asked for and no layer has it.

    A builder of today has no precision flag: an fp16 request that the graph does not carry builds an fp32 engine
    and exits 0.
    """
    if asked != "fp32" and not layers.get(asked):
        seen = ", ".join(f"{name} {count}" for name, count in layers.items()) or "nothing"
        raise ModelRefused(
            f"precision {asked} was asked for, and no layer of the engine has it; layers by precision, read from the "
            f"{read_from}: {seen}",
            hint="precision is in the graph's types: the precision pass changed nothing, or was not run",
        )


def wide_integers(trt: Any, model: ir.Model, network: Any) -> list[dict[str, Any]]:
    """Finds int64 constants outside int32 and how the network holds each.

    Returns:
        For each: name, smallest and largest value, the nodes that read it, and `held_as`: the type in the network,
        or `folded` where the parser used it up while parsing (the ends of a Slice).

    Raises:
        ModelRefused: the network holds one in fewer bits, and its value would be another.
    """
    names = _type_names(trt)
    layers = [network.get_layer(i) for i in range(network.num_layers)]
    held = {
        layer.name: names.get(layer.get_output(0).dtype, "")
        for layer in layers
        if layer.type == trt.LayerType.CONSTANT and layer.num_outputs
    }
    found = []
    for name, low, high, readers in _wide_constants(model):
        held_as = held.get(name, "folded")
        fact = {"name": name, "min": low, "max": high, "read_by": readers, "held_as": held_as}
        if held_as not in ("int64", "folded"):
            raise ModelRefused(
                f"the int64 constant '{name}' ({low} to {high}), read by {', '.join(readers)}, does not fit the "
                f"{held_as} in which the network holds it",
                hint="use values within int32 in the model, or target: onnxruntime",
            )
        found.append(fact)
    return found


def _wide_constants(model: ir.Model) -> list[tuple[str, int, int, list[str]]]:
    import onnx_ir as ir

    values = list(model.graph.initializers.values())
    values += [node.outputs[0] for node in model.graph if node.op_type == "Constant"]
    found = []
    for value in values:
        tensor = ir.convenience.get_const_tensor(value)
        if tensor is None or tensor.dtype != ir.DataType.INT64 or tensor.size == 0:
            continue
        array = tensor.numpy()
        low, high = int(array.min()), int(array.max())
        if low < _INT32[0] or high > _INT32[1]:
            readers = [f"{node.name} ({node.op_type})" for node in value.consumers()]
            found.append((str(value.name), low, high, readers))
    return found


def narrowed_floats(model: ir.Model) -> list[str]:
    """Returns the names of float64 tensors; TensorRT has no float64 and computes them in fp32 without a word."""
    import onnx_ir as ir

    values = [*model.graph.inputs, *model.graph.initializers.values()]
    values += [v for node in model.graph for v in node.outputs]
    return [str(v.name) for v in values if v.dtype == ir.DataType.DOUBLE]


def onnx_types(trt: Any) -> dict[Any, int]:
    """Returns the ONNX element type of each of the library's types that Triton can carry."""
    from compiler.dtypes import DTYPES

    pairs = {
        trt.DataType.BOOL: "bool",
        trt.DataType.UINT8: "uint8",
        trt.DataType.INT8: "int8",
        trt.DataType.INT32: "int32",
        trt.DataType.INT64: "int64",
        trt.DataType.HALF: "float16",
        trt.DataType.FLOAT: "float32",
    }
    return {kind: DTYPES[name].onnx for kind, name in pairs.items()}


def _type_names(trt: Any) -> dict[Any, str]:
    return {
        trt.DataType.FLOAT: "fp32",
        trt.DataType.HALF: "fp16",
        trt.DataType.BF16: "bf16",
        trt.DataType.FP8: "fp8",
        trt.DataType.INT8: "int8",
        trt.DataType.INT4: "int4",
        trt.DataType.INT32: "int32",
        trt.DataType.INT64: "int64",
        trt.DataType.UINT8: "uint8",
        trt.DataType.BOOL: "bool",
    }
