"""Merges matrix products of one input with constant weights into one: query, key and value; gate and up.

    x -> MatMul(Wq) -> Add(bq) -> q
    x -> MatMul(Wk) -> Add(bk) -> k     =>     x -> MatMul([Wq Wk Wv]) -> Add([bq bk bv]) -> Split -> q, k, v
    x -> MatMul(Wv) -> Add(bv) -> v

Fewer calls, and the input is read once; the price is the Split, which copies where a runtime has no views.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from compiler.dtypes import AnyArray
from compiler.passes.base import PassResult
from compiler.precision.graph import add_initializer, constant, drop_unused_initializers

if TYPE_CHECKING:
    import onnx_ir as ir


@dataclass(frozen=True)
class Product:
    """A MatMul with a constant weight, and the Add of a constant bias where one alone reads it.

    Attributes:
        weight: [inputs, outputs].
        bias: [outputs], or None.
        last: what the graph goes on with: the Add, or the MatMul itself.
    """

    node: ir.Node
    weight: AnyArray
    bias: AnyArray | None
    last: ir.Node


def merge_products(model: ir.Model) -> PassResult:
    """Merges the products that read one value and agree in type and in having a bias or none."""
    groups = [group for group in _groups(model.graph) if len(group) > 1]
    for group in groups:
        _merge(model.graph, group)
    drop_unused_initializers(model.graph)
    return PassResult(model, {"products_merged": sum(map(len, groups)), "merged_into": len(groups)})


def _groups(graph: ir.Graph) -> list[list[Product]]:
    found: dict[tuple[int, str, int, bool], list[Product]] = {}
    for node in graph:
        product = _product(node)
        if product is not None:
            kind = str(product.weight.dtype), len(product.weight), product.bias is not None
            found.setdefault((id(node.inputs[0]), *kind), []).append(product)
    return list(found.values())


def _product(node: ir.Node) -> Product | None:
    """Returns the product that a node is, or None; one that is itself an output keeps its name and stays."""
    if not _is(node, "MatMul") or constant(node.inputs[0]) is not None:
        return None
    weight, out = constant(node.inputs[1]), node.outputs[0]
    if weight is None or weight.ndim != 2 or out.is_graph_output():
        return None
    uses = out.uses()
    if len(uses) == 1 and _is(uses[0].node, "Add"):
        add = uses[0].node
        bias = constant(add.inputs[1 - uses[0].idx])
        if bias is not None and bias.shape == (weight.shape[1],) and not add.outputs[0].is_graph_output():
            return Product(node, weight, bias, add)
    return Product(node, weight, None, node)


def _is(node: ir.Node, op_type: str) -> bool:
    return node.op_type == op_type and node.domain in ("", "ai.onnx")


def _merge(graph: ir.Graph, group: Sequence[Product]) -> None:
    import onnx_ir

    first = group[0]
    name = f"{first.node.name or first.node.outputs[0].name}_merged"
    sizes = np.array([p.weight.shape[1] for p in group], dtype=np.int64)
    weight = add_initializer(graph, f"{name}_weight", np.concatenate([p.weight for p in group], axis=1))
    nodes = [onnx_ir.node("MatMul", [first.node.inputs[0], weight], name=name)]
    biases = [p.bias for p in group if p.bias is not None]
    if biases:
        bias = add_initializer(graph, f"{name}_bias", np.concatenate(biases))
        nodes.append(onnx_ir.node("Add", [nodes[0].outputs[0], bias], name=f"{name}_add"))
    for node in nodes:
        _describe(node.outputs[0], first.node.outputs[0], f"{node.name}_out", int(sizes.sum()))
    parts = [onnx_ir.Value(name=f"{name}_{i}") for i in range(len(group))]
    for part, product in zip(parts, group, strict=True):
        _describe(part, product.last.outputs[0], part.name or "", product.weight.shape[1])
    lengths = add_initializer(graph, f"{name}_sizes", sizes)
    nodes.append(onnx_ir.node("Split", [nodes[-1].outputs[0], lengths], {"axis": -1}, outputs=parts))
    # Before the first: all read one value, and each reader of a part comes after the product that it replaces.
    graph.insert_before(first.node, nodes)
    for part, product in zip(parts, group, strict=True):
        product.last.outputs[0].replace_all_uses_with(part)
        graph.remove({product.node, product.last}, safe=True)


def _describe(value: ir.Value, like: ir.Value, name: str, width: int) -> None:
    """Gives a value a name, another one's type and, as far as it is known, its shape with another last size."""
    import onnx_ir

    value.name, value.type = name, like.type
    if like.shape is not None:
        value.shape = onnx_ir.Shape([*like.shape[:-1], width])
