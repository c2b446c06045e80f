"""fp16 and bf16 written into the graph: which values are half, and a Cast at each border."""

from __future__ import annotations

from collections.abc import Set
from typing import TYPE_CHECKING

import numpy as np

from compiler.precision.graph import add_initializer, add_node, attribute, constant, insert_after_source
from compiler.precision.holds import HalfType, low_variables
from compiler.precision.schemas import schema_of

if TYPE_CHECKING:
    import onnx_ir as ir


def insert_casts(model: ir.Model, half: HalfType, held: Set[str]) -> dict[str, int]:
    """Converts all nodes but the held ones, in place; the graph's inputs and outputs keep their types.

    A Cast goes where its value is first known, so the graph stays sorted, and serves all readers.

    Args:
        model: a prepared graph (names, types, no Constant nodes).
        half: the type.
        held: names of nodes that stay in fp32; nodes with subgraphs must be among them.

    Returns:
        Counts of nodes and casts.
    """
    return _Conversion(model, half).run(held)


class _Conversion:
    def __init__(self, model: ir.Model, half: HalfType) -> None:
        import onnx_ir

        self._model = model
        self._half = half
        self._dtype = onnx_ir.DataType[half.onnx]
        self._other: dict[ir.Value, ir.Value] = {}
        self.casts = 0

    def run(self, held: Set[str]) -> dict[str, int]:
        import onnx_ir
        from onnx_ir import DataType

        graph = self._model.graph
        outputs = list(graph.outputs)
        low_inputs: dict[tuple[ir.Node, int], ir.Value] = {}
        low_values: list[ir.Value] = []
        converted = 0
        for node in graph:
            if node.name in held:
                continue
            schema = schema_of(node, self._model.opset_imports)
            low = low_variables(node, schema, self._half) if schema is not None else frozenset()
            if schema is None or not low:
                continue
            converted += 1
            for index, value in enumerate(node.inputs):
                slot = schema.input(index)
                if value is not None and value.dtype == DataType.FLOAT and slot and slot.variable in low:
                    low_inputs[node, index] = value
            for index, value in enumerate(node.outputs):
                slot = schema.output(index)
                if value.dtype == DataType.FLOAT and slot and slot.variable in low:
                    low_values.append(value)
            if node.op_type == "Cast" and attribute(node, "to", 0) == DataType.FLOAT:
                node.attributes["to"] = onnx_ir.AttrInt64("to", int(self._dtype))
        is_low = set(low_values)
        # Borders out: who reads a half value and is not itself half at that input gets it cast back. This sees the
        # readers inside subgraphs too.
        for value in low_values:
            readers = [u for u in value.uses() if (u.node, u.idx) not in low_inputs]
            for use in readers:
                use.node.replace_input_with(use.idx, self._cast(value, DataType.FLOAT))
        # Borders in.
        for (node, index), value in low_inputs.items():
            if value not in is_low:
                node.replace_input_with(index, self._low(value))
        for value in low_values:
            # A new type object: a cloned graph shares the old one with the graph it came from.
            value.type = onnx_ir.TensorType(self._dtype)
        self._restore_outputs(outputs, is_low)
        return {"half_nodes": converted, "casts": self.casts}

    def _restore_outputs(self, outputs: list[ir.Value], is_low: set[ir.Value]) -> None:
        """Gives each graph output its type back, under its name."""
        from onnx_ir import DataType

        for index, value in enumerate(outputs):
            if value in is_low:
                name = value.name
                value.name = f"{name}_{self._half.name}"
                cast = self._cast(value, DataType.FLOAT)
                cast.name = name
                self._model.graph.outputs[index] = cast

    def _low(self, value: ir.Value) -> ir.Value:
        array = constant(value)
        if array is None:
            return self._cast(value, self._dtype)
        if value not in self._other:
            import ml_dtypes

            target = np.float16 if self._half.name == "fp16" else ml_dtypes.bfloat16
            low = add_initializer(self._model.graph, f"{value.name}_{self._half.name}", array.astype(target))
            self._other[value] = low
        return self._other[value]

    def _cast(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        if value not in self._other:
            node = add_node(
                "Cast", [value], f"{value.name}_as_{dtype.name.lower()}", dtype, value.shape, {"to": int(dtype)}
            )
            insert_after_source(self._model.graph, value, [node])
            self._other[value] = node.outputs[0]
            self.casts += 1
        return self._other[value]
