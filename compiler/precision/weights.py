"""The scheme that a target wants its int8 in, and weights: which there are, and their steps and scales. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from compiler.dtypes import AnyArray
from compiler.precision.calibration import Floats
from compiler.precision.graph import attribute, constant

if TYPE_CHECKING:
    import onnx_ir as ir


@dataclass(frozen=True)
class Scheme:
    """How a target wants its int8.

    Attributes:
        unsigned: activations are uint8 with a zero point; else int8, symmetric.
        weight_bits: 8, or 7 where sums of products would saturate.
        int8_chain: quantise the bias and what convolutions give, which ONNX Runtime needs for its integer kernels.
    """

    unsigned: bool
    weight_bits: int
    int8_chain: bool


def scheme_for(target: str, weight_bits: int) -> Scheme:
    """Returns the target's scheme.

    TensorRT takes symmetric int8 only, and its parser fails on an INT32 bias; its builder decides itself where int8
    is carried on, and OpenVINO does too.
    """
    if target.startswith("tensorrt"):
        return Scheme(unsigned=False, weight_bits=8, int8_chain=False)
    return Scheme(unsigned=True, weight_bits=weight_bits, int8_chain=target == "onnxruntime")


@dataclass(frozen=True)
class Smoothing:
    """Factors by which the channels of a tensor are divided and the rows of the weights that read it multiplied.

    Attributes:
        factors: [channels].
        low, high: the range of the divided tensor, which holds 0.
    """

    factors: Floats
    low: float
    high: float


@dataclass(frozen=True)
class Weight:
    """The constant operand of a node: its input index and the axis of its output channels."""

    index: int
    axis: int


def weight_of(node: ir.Node) -> Weight | None:
    """Returns the constant weight of a node that can be int8, or None."""
    if node.domain not in ("", "ai.onnx") or len(node.inputs) < 2 or (array := constant(node.inputs[1])) is None:
        return None
    if array.dtype != np.float32 or array.size == 0:
        return None
    if node.op_type == "Conv":
        return Weight(1, 0)
    if node.op_type == "MatMul" and array.ndim == 2:
        return Weight(1, 1)
    plain = attribute(node, "alpha", 1.0) == 1.0 and attribute(node, "beta", 1.0) == 1.0
    if node.op_type == "Gemm" and plain and not attribute(node, "transA", 0):
        return Weight(1, 0 if attribute(node, "transB", 0) else 1)
    return None


def quantized_weight(
    weights: AnyArray, axis: int, bits: int, floor: AnyArray | float = 0.0
) -> tuple[AnyArray, AnyArray]:
    """Returns int8 weights and one float32 scale per channel, symmetric.

    Args:
        weights: float32 of any shape.
        axis: of the channels.
        bits: 8 or 7.
        floor: smallest allowed scale, per channel.
    """
    top = 2 ** (bits - 1) - 1
    others = tuple(i for i in range(weights.ndim) if i != axis)
    scale = np.maximum(np.abs(weights).max(axis=others) / top, floor).astype(np.float32)
    # A channel of zeros (or of denormals, whose scale would be 0) keeps a scale that divides.
    scale = np.where(scale < np.finfo(np.float32).tiny, np.float32(1), scale)
    shape = tuple(-1 if i == axis else 1 for i in range(weights.ndim))
    steps = np.rint(np.divide(weights, scale.reshape(shape)))
    return np.clip(steps, -top, top).astype(np.int8), scale
