"""Weights as the kernels read them: bytes in panels, with a scale and a zero point for each row.

All arrays of a model are views of one piece of memory, in an order that the configuration says: that memory can be a
file, which is written once and mapped from then on, by every process that serves the model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from backends.llm.loaders.base import GroupedWeight, LoadedModel
from backends.llm.models import names
from backends.llm.models.config import DecoderConfig
from backends.llm.models.weights import rows_of_bytes, values

if TYPE_CHECKING:
    import numpy.typing as npt

    Floats = npt.NDArray[np.float32]

LANES = 16  # rows that a vector's lanes stand for
PANEL = 32  # rows of a matrix that are packed together
# How many columns share a scale of the other operand's bytes. 96 are 2% faster on prompts and twice as far off; what
# goes into the head has the largest outliers, and little of the time.
GROUP, HEAD_GROUP = 64, 32
_ALIGNMENT = 64


@dataclass(frozen=True)
class Packed:
    """A matrix.

    Attributes:
        codes: [rows / 32, columns / 4, 32, 4] uint8, rows and columns filled up to multiples of 64.
        factors: [rows / 16, 2, 16] float32: scales, then zero points.
        bias: [rows] float32, or empty.
        group: columns that share a scale of the other operand's bytes.
    """

    codes: npt.NDArray[np.uint8]
    factors: Floats
    bias: Floats
    group: int

    @property
    def rows(self) -> int:
        return len(self.codes) * PANEL

    @property
    def columns(self) -> int:
        return self.codes.shape[1] * 4


@dataclass(frozen=True)
class PackedModel:
    """All weights of a decoder.

    Attributes:
        layers: for each layer: query, key and value; output; gate and up; down.
        head: the matrix of the logits.
        embedding: the same where it is shared.
        norms: [layers, 4, hidden]: before and after attention, before and after the MLP; those not used are ones.
        head_norms: [layers, 2, head_dim] of queries and keys.
        final_norm: [hidden].
    """

    layers: tuple[tuple[Packed, Packed, Packed, Packed], ...]
    head: Packed
    embedding: Packed
    norms: Floats
    head_norms: Floats
    final_norm: Floats


class Cutter:
    """Cuts arrays off a piece of memory, one after the other; without memory it only counts.

    Attributes:
        size: bytes of what was cut.
    """

    def __init__(self, memory: npt.NDArray[np.uint8] | None) -> None:
        self.size = 0
        self._memory = memory

    def cut(self, shape: tuple[int, ...], kind: Any) -> npt.NDArray[Any]:
        """Returns an array that begins at a cache line."""
        first, size = self.size, math.prod(shape) * np.dtype(kind).itemsize
        self.size = _filled(first + size, _ALIGNMENT)
        if self._memory is None:
            return np.zeros(0, kind)
        found: npt.NDArray[Any] = self._memory[first : first + size].view(kind)
        return found.reshape(shape)


class _ModelCutter(Cutter):
    def matrix(self, rows: int, columns: int, *, bias: bool = False, group: int = GROUP) -> Packed:
        rows, columns = _filled(rows, 2 * PANEL), _filled(columns, GROUP)
        return Packed(
            codes=self.cut((rows // PANEL, columns // 4, PANEL, 4), np.uint8),
            factors=self.cut((rows // LANES, 2, LANES), np.float32),
            bias=self.cut((rows * bias,), np.float32),
            group=group,
        )

    def model(self, c: DecoderConfig) -> PackedModel:
        queries, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        layers = tuple(
            (
                self.matrix(queries + 2 * keys, c.hidden_size, bias=c.attention_bias),
                self.matrix(c.hidden_size, queries),
                self.matrix(2 * c.intermediate_size, c.hidden_size),
                self.matrix(c.hidden_size, c.intermediate_size),
            )
            for _ in range(c.num_hidden_layers)
        )
        embedding = self.matrix(c.vocab_size, c.hidden_size, group=HEAD_GROUP)
        return PackedModel(
            layers=layers,
            head=embedding if c.tie_word_embeddings else self.matrix(c.vocab_size, c.hidden_size, group=HEAD_GROUP),
            embedding=embedding,
            norms=self.cut((c.num_hidden_layers, 4, c.hidden_size), np.float32),
            head_norms=self.cut((c.num_hidden_layers, 2, c.head_dim), np.float32),
            final_norm=self.cut((c.hidden_size,), np.float32),
        )


def packed_bytes(config: DecoderConfig) -> int:
    """Returns the bytes of all packed weights of a model."""
    cutter = _ModelCutter(None)
    cutter.model(config)
    return cutter.size


def views(config: DecoderConfig, memory: npt.NDArray[np.uint8]) -> PackedModel:
    """Returns the packed weights in `packed_bytes` of memory, which begins at a cache line."""
    return _ModelCutter(memory).model(config)


def fill(packed: PackedModel, model: LoadedModel) -> None:
    """Reads and packs a model's weights, one matrix after the other."""
    c, weights = model.config, model.weights
    packed.norms[:], packed.head_norms[:] = 1, 1
    for index, matrices in enumerate(packed.layers):
        prefix = names.layer(index)
        parts = (names.QKV, ("self_attn.o_proj",), names.GATE_UP, ("mlp.down_proj",))
        for matrix, together in zip(matrices, parts, strict=True):
            pack([rows_of_bytes(weights[f"{prefix}{part}.weight"]) for part in together], matrix)
        if c.attention_bias:
            bias = np.concatenate([values(weights[f"{prefix}{part}.bias"]) for part in names.QKV])
            matrices[0].bias[: len(bias)] = bias
        for place, name in _norm_names(c.post_norms).items():
            packed.norms[index, place] = values(weights[f"{prefix}{name}.weight"]) + np.float32(c.norm_offset)
        for place, name in enumerate(("q_norm", "k_norm") if c.qk_norm else ()):
            found = values(weights[f"{prefix}self_attn.{name}.weight"])
            packed.head_norms[index, place] = found + np.float32(c.norm_offset)
    pack([rows_of_bytes(weights[names.EMBEDDING])], packed.embedding)
    if not c.tie_word_embeddings:
        pack([rows_of_bytes(weights[names.HEAD])], packed.head)
    packed.final_norm[:] = values(weights[names.FINAL_NORM]) + np.float32(c.norm_offset)


def pack(parts: Sequence[GroupedWeight], packed: Packed) -> None:
    """Packs the rows of matrices that read the same input as one; what fills up rows and columns stays as it is, 0."""
    scales, zeros = (np.zeros(packed.rows, np.float32) for _ in range(2))
    row = 0
    for part in parts:
        end = row + len(part.codes)
        scales[row:end] = part.scales[:, 0]
        zeros[row:end] = np.rint(-part.mins[:, 0] / part.scales[:, 0])
        _place(packed.codes, part.codes, row)
        row = end
    packed.factors[:, 0], packed.factors[:, 1] = scales.reshape(-1, LANES), zeros.reshape(-1, LANES)


def _place(packed: npt.NDArray[np.uint8], codes: npt.NDArray[np.uint8], first: int) -> None:
    """Copies rows into their panels, a panel at a time: a copy of a whole head would double its memory."""
    done = 0
    while done < len(codes):
        panel, place = divmod(first + done, PANEL)
        some = codes[done : done + PANEL - place]
        some = np.pad(some, ((0, 0), (0, -some.shape[1] % 4)))
        packed[panel, : some.shape[1] // 4, place : place + len(some)] = some.reshape(len(some), -1, 4).swapaxes(0, 1)
        done += len(some)


def _filled(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def _norm_names(post_norms: bool) -> dict[int, str]:
    if post_norms:
        order = ("input", "post_attention", "pre_feedforward", "post_feedforward")
        return {place: f"{name}_layernorm" for place, name in enumerate(order)}
    return {0: "input_layernorm", 2: "post_attention_layernorm"}
