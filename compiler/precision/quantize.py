"""int8 written into the graph as QuantizeLinear/DequantizeLinear pairs: one scheme per target, own insertion.

onnxruntime.quantization is not used for this: it replaces a quantised tensor for all of its consumers, so that a node
held in fp32 would still read quantised values, and it needs a protobuf copy of the weights per attempt.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import TYPE_CHECKING

import numpy as np

from compiler.dtypes import AnyArray
from compiler.precision.calibration import TensorRange
from compiler.precision.graph import add_initializer, add_node, constant, insert_after_source
from compiler.precision.weights import Scheme, Smoothing, quantized_weight, weight_of

if TYPE_CHECKING:
    import onnx_ir as ir

# What passes int8 on between convolutions; the second set keeps its input's scale.
_CARRIERS = frozenset({"Add", "Concat", "GlobalAveragePool", "AveragePool"})
_SAME_SCALE = frozenset({"MaxPool", "Flatten", "Reshape", "Transpose", "Squeeze", "Unsqueeze"})
# What may be smoothed: products whose data has its channels in the last axis.
SMOOTHED_OPS = ("MatMul", "Gemm")


def tensors_to_calibrate(graph: ir.Graph, scheme: Scheme) -> list[str]:
    """Returns the names of all tensors whose range a plan may need."""
    names: dict[str, None] = {}
    for node in graph:
        if weight_of(node) and node.inputs[0] is not None and constant(node.inputs[0]) is None:
            names[_name(node.inputs[0])] = None
        if scheme.int8_chain and (node.op_type == "Conv" or node.op_type in _CARRIERS):
            value = _after_activation(node.outputs[0])
            names[_name(value)] = None
    return list(names)


def divided(graph: ir.Graph, value: ir.Value, smoothing: Smoothing) -> ir.Value:
    """Inserts and returns a value divided by its channels' factors."""
    import onnx_ir

    name = _name(value)
    inverse = add_initializer(graph, f"{name}_unsmooth", np.divide(np.float32(1), smoothing.factors))
    node = add_node("Mul", [value, inverse], f"{name}_smooth", onnx_ir.DataType.FLOAT, value.shape)
    insert_after_source(graph, value, [node])
    return node.outputs[0]


class Quantizer:
    """Inserts pairs into one graph; every tensor is quantised once and shared by the nodes that are int8.

    Args:
        graph: is changed.
        ranges: by tensor name.
        scheme: of the target.
        smoothing: by tensor name (see `smoothing`).
    """

    def __init__(
        self,
        graph: ir.Graph,
        ranges: Mapping[str, TensorRange],
        scheme: Scheme,
        smoothing: Mapping[str, Smoothing] | None = None,
    ) -> None:
        self._graph = graph
        self._ranges = {n: (r.low, r.high) for n, r in ranges.items() if r.finite}
        self._smoothing = smoothing or {}
        self._smoothed: dict[str, ir.Value] = {}
        self._scheme = scheme
        self._pairs: dict[str, ir.Value] = {}
        self._dequantized: set[ir.Value] = set()
        self._parameters: dict[str, tuple[ir.Value, ir.Value, float]] = {}
        self.counts = {"quantized_nodes": 0, "carrier_nodes": 0, "qdq_pairs": 0, "smoothed_tensors": 0}

    def quantize(self, names: Set[str]) -> None:
        """Makes the named nodes int8, and for a chain what lies between them."""
        for node in list(self._graph):
            if node.name in names:
                self.quantize_node(node)
                if self._scheme.int8_chain and node.op_type == "Conv":
                    self._carry_on(node.outputs[0], None)
            elif self._scheme.int8_chain and node.op_type in _CARRIERS | _SAME_SCALE:
                self._carry(node)

    def quantize_node(self, node: ir.Node) -> None:
        """Puts pairs before the data and the weight of one node, and its bias in int32 for a chain."""
        weight = weight_of(node)
        data = node.inputs[0]
        assert weight is not None and data is not None
        smoothing = self._smoothing.get(_name(data)) if node.op_type in SMOOTHED_OPS else None
        if smoothing is not None and self._existing(data) is None:
            data = self._divided(data, smoothing)
        else:
            smoothing = None  # what a convolution hands on in int8 is read as it is
        node.replace_input_with(0, self._pair(data))
        scale = self._parameters[_name(data)][2]
        bias = node.inputs[2] if self._scheme.int8_chain and len(node.inputs) > 2 else None
        values = constant(bias)
        quantize_bias = values is not None and values.ndim == 1
        array = constant(node.inputs[weight.index])
        assert array is not None
        # A bias must fit int32 at the scale of data times weight.
        floor = np.abs(values) / (scale * 2.0**30) if quantize_bias and values is not None else 0.0
        if np.ndim(floor) and np.shape(floor) != (array.shape[weight.axis],):
            quantize_bias, floor = False, 0.0
        if smoothing is not None:
            array = np.multiply(array, np.expand_dims(smoothing.factors, weight.axis))
        dequantized, weight_scale = self._weight(node.inputs[weight.index], array, weight.axis, floor)
        node.replace_input_with(weight.index, dequantized)
        if quantize_bias and bias is not None and values is not None:
            node.replace_input_with(2, self._bias(bias, values, scale * weight_scale.astype(np.float64)))
        self.counts["quantized_nodes"] += 1

    def _divided(self, value: ir.Value, smoothing: Smoothing) -> ir.Value:
        """Returns the value divided by its channels' factors, for all int8 readers that are no part of a chain."""
        name = _name(value)
        if name not in self._smoothed:
            self._smoothed[name] = divided(self._graph, value, smoothing)
            self._ranges[_name(self._smoothed[name])] = (smoothing.low, smoothing.high)
            self.counts["smoothed_tensors"] += 1
        return self._smoothed[name]

    def _carry(self, node: ir.Node) -> None:
        """Lets a node between convolutions run on int8 where all its data already is."""
        data = list(node.inputs) if node.op_type in ("Add", "Concat") else [node.inputs[0]]
        pairs = [p for v in data if v is not None and (p := self._existing(v)) is not None]
        if not pairs or len(pairs) < len(data):
            return
        if node.op_type not in _SAME_SCALE and not self._usable(_after_activation(node.outputs[0])):
            return
        for index, pair in enumerate(pairs):
            node.replace_input_with(index, pair)
        self._carry_on(node.outputs[0], _name(pairs[0]) if node.op_type in _SAME_SCALE else None)
        self.counts["carrier_nodes"] += 1

    def _carry_on(self, value: ir.Value, like: str | None) -> None:
        """Quantises what a node gives, after its activation, for all who read it."""
        if like is None:
            value = _after_activation(value)
            if not self._usable(value):
                return
        else:
            self._parameters[_name(value)] = self._parameters[like]
        if _name(value) in self._pairs:
            return
        readers = [(use.node, use.idx) for use in value.uses()]
        pair = self._pair(value)
        for node, index in readers:
            node.replace_input_with(index, pair)
        if value.is_graph_output():
            outputs = self._graph.outputs
            outputs[outputs.index(value)] = pair
            pair.name, value.name = _name(value), f"{_name(value)}_before_qdq"

    def _usable(self, value: ir.Value) -> bool:
        return _name(value) in self._ranges

    def _existing(self, value: ir.Value) -> ir.Value | None:
        """Returns the dequantised form of a value that has a pair, which it may itself be."""
        return value if value in self._dequantized else self._pairs.get(_name(value))

    def _pair(self, value: ir.Value) -> ir.Value:
        import onnx_ir

        if (existing := self._existing(value)) is not None:
            return existing
        name = _name(value)
        if name not in self._parameters:
            self._parameters[name] = self._activation_parameters(name)
        scale, zero, _ = self._parameters[name]
        assert zero.dtype is not None
        quantize = add_node("QuantizeLinear", [value, scale, zero], f"{name}_q", zero.dtype, value.shape)
        dequantize = add_node(
            "DequantizeLinear", [quantize.outputs[0], scale, zero], f"{name}_dq", onnx_ir.DataType.FLOAT, value.shape
        )
        insert_after_source(self._graph, value, [quantize, dequantize])
        self._pairs[name] = dequantize.outputs[0]
        self._dequantized.add(dequantize.outputs[0])
        self._parameters[f"{name}_dq"] = self._parameters[name]
        self.counts["qdq_pairs"] += 1
        return dequantize.outputs[0]

    def _activation_parameters(self, name: str) -> tuple[ir.Value, ir.Value, float]:
        low, high = self._ranges[name]
        zero: AnyArray
        if self._scheme.unsigned:
            scale = np.float32((high - low) / 255 or 1.0)
            zero = np.array(np.clip(round(-low / float(scale)), 0, 255), dtype=np.uint8)
        else:
            scale = np.float32(max(-low, high) / 127 or 1.0)
            zero = np.array(0, dtype=np.int8)
        scale = max(scale, np.float32(np.finfo(np.float32).tiny))
        return (
            add_initializer(self._graph, f"{name}_scale", np.array(scale, dtype=np.float32)),
            add_initializer(self._graph, f"{name}_zero_point", zero),
            float(scale),
        )

    def _weight(
        self, value: ir.Value | None, array: AnyArray, axis: int, floor: AnyArray | float
    ) -> tuple[ir.Value, AnyArray]:
        import onnx_ir

        assert value is not None
        steps, scale = quantized_weight(array, axis, self._scheme.weight_bits, floor)
        name = _name(value)
        inputs = [
            add_initializer(self._graph, f"{name}_int8", steps),
            add_initializer(self._graph, f"{name}_int8_scale", scale),
            add_initializer(self._graph, f"{name}_int8_zero_point", np.zeros(scale.shape, dtype=np.int8)),
        ]
        node = add_node(
            "DequantizeLinear", inputs, f"{_name(inputs[0])}_dq", onnx_ir.DataType.FLOAT, value.shape, {"axis": axis}
        )
        self._graph.insert_before(self._graph[0], [node])
        return node.outputs[0], scale

    def _bias(self, value: ir.Value, array: AnyArray, scale: AnyArray) -> ir.Value:
        import onnx_ir

        steps = np.clip(np.rint(np.divide(array, scale)), -(2**31) + 1, 2**31 - 1).astype(np.int32)
        inputs = [
            add_initializer(self._graph, f"{_name(value)}_int32", steps),
            add_initializer(self._graph, f"{_name(value)}_int32_scale", scale.astype(np.float32)),
            add_initializer(self._graph, f"{_name(value)}_int32_zero_point", np.zeros(scale.shape, dtype=np.int32)),
        ]
        node = add_node(
            "DequantizeLinear", inputs, f"{_name(inputs[0])}_dq", onnx_ir.DataType.FLOAT, value.shape, {"axis": 0}
        )
        self._graph.insert_before(self._graph[0], [node])
        return node.outputs[0]


def _after_activation(value: ir.Value) -> ir.Value:
    """Returns what a Relu or Clip that alone reads the value makes of it: the kernels fold it into their rounding."""
    uses = value.uses()
    if len(uses) == 1 and not value.is_graph_output() and uses[0].node.op_type in ("Relu", "Clip"):
        return uses[0].node.outputs[0]
    return value


def _name(value: ir.Value | None) -> str:
    assert value is not None and value.name
    return str(value.name)
