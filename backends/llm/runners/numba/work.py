"""What a step reads and writes, as tuples that compiled code takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from backends.llm.models.config import DecoderConfig
from backends.llm.runners.memory import zeroed
from backends.llm.runners.numba.attention import QUERY_TYPE, SPAN, TILE_ROWS
from backends.llm.runners.numba.packing import Cutter, Packed, PackedModel
from backends.llm.runners.numba.threads import counters_of

if TYPE_CHECKING:
    import numpy.typing as npt

MAX_ROWS = 512  # tokens that are computed together; a longer step is several
MAX_PARTS = 4096  # spans of single tokens that are computed apart and then merged
_PHASES_OF_A_LAYER, _OTHER_PHASES = 10, 2


class Shape(NamedTuple):
    """Numbers of a decoder; see DecoderConfig. Flags are 0 and 1."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    gelu: int
    qk_norm: int
    post_norms: int
    eps: np.float32
    query_scale: np.float32
    embedding_scale: np.float32


class Model(NamedTuple):
    """Where the weights are.

    Attributes:
        matrices: [4 * layers + 2, 6] int64: addresses of codes and factors, rows, columns, place of the bias in
            `biases` or -1, columns that share a scale of the other operand. The last two are head and embedding.
        biases: [layers with biases, rows].
        windows: [layers] int64 tokens that a layer sees, 0 is all.
        softcap: [1] of the attention's scores, 0 is none.
    """

    matrices: npt.NDArray[np.int64]
    biases: npt.NDArray[np.float32]
    norms: npt.NDArray[np.float32]
    head_norms: npt.NDArray[np.float32]
    final_norm: npt.NDArray[np.float32]
    windows: npt.NDArray[np.int64]
    softcap: npt.NDArray[np.float32]


class Step(NamedTuple):
    """One step's tokens, as in StepInputs, and room for what is between the products.

    Attributes:
        counts: [9] int64, see step_attention.py.
        request_of: [rows] the request of a token.
        items: [.., 6] int32: first row, tokens, head of keys, request, span (-1: all of them), its place in `parts`.
        first_part: [rows] the place of a token's first span in `parts`, or -1: its spans are not computed apart.
        cos, sin: [2, rows, head_dim / 2]: of layers that see everything, and of windowed ones.
    """

    counts: npt.NDArray[np.int64]
    counters: npt.NDArray[np.int64]
    ids: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int32]
    request_of: npt.NDArray[np.int32]
    begins: npt.NDArray[np.int32]
    tables: npt.NDArray[np.int32]
    table_begins: npt.NDArray[np.int32]
    logits_rows: npt.NDArray[np.int32]
    items: npt.NDArray[np.int32]
    first_part: npt.NDArray[np.int32]
    cos: npt.NDArray[np.float32]
    sin: npt.NDArray[np.float32]
    hidden: npt.NDArray[np.float32]
    codes: npt.NDArray[np.int8]
    scales: npt.NDArray[np.float32]
    totals: npt.NDArray[np.float32]
    qkv: npt.NDArray[np.float32]
    attended: npt.NDArray[np.float32]
    added: npt.NDArray[np.float32]
    gate_up: npt.NDArray[np.float32]
    part_totals: npt.NDArray[np.float32]
    parts: npt.NDArray[np.float32]


class Scratch(NamedTuple):
    """One thread's own room, and its number."""

    thread: int
    row: npt.NDArray[np.float32]
    query: npt.NDArray[Any]
    scores: npt.NDArray[np.float32]
    totals: npt.NDArray[np.float32]
    mixed: npt.NDArray[np.float32]
    span_totals: npt.NDArray[np.float32]
    span_mixed: npt.NDArray[np.float32]


def shape_of(config: DecoderConfig) -> Shape:
    return Shape(
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        gelu=int(config.hidden_act != "silu"),
        qk_norm=int(config.qk_norm),
        post_norms=int(config.post_norms),
        eps=np.float32(config.rms_norm_eps),
        query_scale=np.float32(config.query_scale),
        embedding_scale=np.float32(config.embedding_scale),
    )


def model_of(config: DecoderConfig, packed: PackedModel) -> Model:
    matrices = [matrix for layer in packed.layers for matrix in layer]
    matrices += [packed.head, packed.embedding]
    biased = [matrix.bias for matrix in matrices if matrix.bias.size]
    table, seen = [], 0
    for matrix in matrices:
        table.append(_address(matrix, seen if matrix.bias.size else -1))
        seen += bool(matrix.bias.size)
    windowed = config.windowed_layers or (False,) * config.num_hidden_layers
    return Model(
        matrices=np.array(table, np.int64),
        biases=np.stack(biased) if biased else np.zeros((1, 1), np.float32),
        norms=packed.norms,
        head_norms=packed.head_norms,
        final_norm=packed.final_norm,
        softcap=np.array([config.attention_softcap or 0], np.float32),
        windows=np.array([(config.sliding_window or 0) * seen for seen in windowed], np.int64),
    )


def _address(matrix: Packed, bias: int) -> tuple[int, ...]:
    return matrix.codes.ctypes.data, matrix.factors.ctypes.data, matrix.rows, matrix.columns, bias, matrix.group


def step_of(shape: Shape, model: Model, max_blocks: int, num_threads: int) -> Step:
    """Returns room for MAX_ROWS tokens; `max_blocks` is those of one request. Memory is taken when it is written to."""
    counter = Cutter(None)
    _cut_step(counter, shape, model, max_blocks, num_threads)
    return _cut_step(Cutter(zeroed(counter.size)), shape, model, max_blocks, num_threads)


def _cut_step(cutter: Cutter, shape: Shape, model: Model, max_blocks: int, num_threads: int) -> Step:
    group = shape.heads // shape.kv_heads
    widest = int(model.matrices[:, 3].max())
    by_kind = model.matrices[: 4 * shape.layers, 2].reshape(-1, 4).max(0)

    def floats(*dims: int) -> Any:
        return cutter.cut(dims, np.float32)

    def ints(*dims: int) -> Any:
        return cutter.cut(dims, np.int32)

    return Step(
        counts=cutter.cut((9,), np.int64),
        counters=cutter.cut((counters_of(_PHASES_OF_A_LAYER * shape.layers + _OTHER_PHASES, num_threads),), np.int64),
        ids=ints(MAX_ROWS),
        positions=ints(MAX_ROWS),
        request_of=ints(MAX_ROWS),
        begins=ints(MAX_ROWS + 1),
        tables=ints(MAX_ROWS * max_blocks),
        table_begins=ints(MAX_ROWS + 1),
        logits_rows=ints(MAX_ROWS),
        items=ints(2 * (MAX_PARTS + MAX_ROWS * shape.kv_heads), 6),
        first_part=ints(MAX_ROWS),
        cos=floats(2, MAX_ROWS, shape.head_dim // 2),
        sin=floats(2, MAX_ROWS, shape.head_dim // 2),
        hidden=floats(MAX_ROWS, shape.hidden),
        codes=cutter.cut((MAX_ROWS * widest,), np.int8),
        scales=floats(MAX_ROWS * int((model.matrices[:, 3] // model.matrices[:, 5]).max())),
        totals=floats(MAX_ROWS),
        qkv=floats(MAX_ROWS, int(by_kind[0])),
        attended=floats(MAX_ROWS, shape.heads * shape.head_dim),
        added=floats(MAX_ROWS, int(max(by_kind[1], by_kind[3]))),
        gate_up=floats(MAX_ROWS, int(by_kind[2])),
        part_totals=floats(MAX_PARTS, group, 2),
        parts=floats(MAX_PARTS, group, shape.head_dim),
    )


def scratch_of(shape: Shape, thread: int) -> Scratch:
    rows = max(TILE_ROWS, shape.heads // shape.kv_heads) + 3
    widest = max(shape.hidden, shape.intermediate)

    counter = Cutter(None)
    _cut_scratch(counter, thread, shape, rows, widest)
    return _cut_scratch(Cutter(zeroed(counter.size)), thread, shape, rows, widest)


def _cut_scratch(cutter: Cutter, thread: int, shape: Shape, rows: int, widest: int) -> Scratch:
    def floats(*dims: int) -> Any:
        return cutter.cut(dims, np.float32)

    return Scratch(
        thread=thread,
        row=floats(widest),
        query=cutter.cut((rows, shape.head_dim), QUERY_TYPE),
        scores=floats(rows, SPAN),
        totals=floats(rows, 2),
        mixed=floats(rows, shape.head_dim),
        span_totals=floats(rows, 2),
        span_mixed=floats(rows, shape.head_dim),
    )
