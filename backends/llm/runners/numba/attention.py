"""Attention over blocks of 16 tokens, read in place through a request's block table.

A block of one head holds bfloat16: keys as [head_dim / 2][16 tokens][2], values as [8 pairs of tokens][head_dim][2], so
that a vector is 16 tokens' two numbers of a key, or 16 numbers of two tokens' values. Scores and sums are float32;
queries and weights are bfloat16 where the processor multiplies that, and float32 elsewhere.

A row (one head of one token) is computed span by span: 256 tokens at fixed positions, each with its own maximum, merged
in order (the online softmax of FlashAttention). Spans can be computed by several threads, and rows beside others: the
bits of a row depend on its own context alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir

from backends.llm.runners.numba.compiling import inner
from backends.llm.runners.numba.packing import LANES
from backends.llm.runners.numba.rows import bfloat, exponential
from backends.llm.runners.numba.vectors import F32, FLOATS, HAS_BFLOAT, I32, I64, ZEROS, Code, constant, kernel

BLOCK = 16  # tokens
SPAN = 256  # tokens
PAIR = 4 if HAS_BFLOAT else 8  # bytes of two numbers of a query or of two weights
QUERY_TYPE = np.int16 if HAS_BFLOAT else np.float32
TILE_ROWS = 16  # that are computed together, as many whole tokens as fit


def _scores(rows: int) -> Any:
    """Returns the kernel for the scores of so many rows with a block's 16 keys."""

    @kernel(6)
    def scores(c: Code, query: Any, query_row: Any, keys: Any, quads: Any, out: Any, out_row: Any) -> None:
        """quads: head_dim / 4; two pairs of numbers in a turn go to sums of their own."""

        def quad(index: Any, sums: list[Any]) -> list[Any]:
            for half in range(2):
                pairs = c.pairs(c.at(c.at(keys, c.times(index, 8 * LANES)), 4 * LANES * half))
                for row in range(rows):
                    at = c.at(c.at(query, c.times(query_row, row)), c.times(index, 2 * PAIR))
                    sums[2 * row + half] = c.dot_pairs(sums[2 * row + half], pairs, c.at(at, PAIR * half))
            return sums

        sums = c.loop(quads, [ZEROS] * (2 * rows), quad)
        for row in range(rows):
            c.store(c.b.fadd(sums[2 * row], sums[2 * row + 1]), c.at(out, c.times(out_row, row)))

    return scores


def _mixture(rows: int, vectors: int) -> Any:
    """Returns the kernel for the sums of values, times their weights: so many rows, 16 * vectors numbers of each."""

    @kernel(9)
    def mixture(
        c: Code, weights: Any, weights_row: Any, values: Any, table: Any, blocks: Any, block_bytes: Any,
        pair_bytes: Any, out: Any, out_row: Any,
    ) -> None:  # fmt: skip
        def block(index: Any, carried: list[Any]) -> list[Any]:
            number = c.b.sext(c.load(I32, c.at(table, c.times(index, 4))), I64)
            start = c.at(values, c.b.mul(number, block_bytes))
            first = c.at(weights, c.times(index, PAIR * BLOCK // 2))

            def pair(index: Any, sums: list[Any]) -> list[Any]:
                at = c.at(start, c.times(pair_bytes, index))
                pairs = [c.pairs(c.at(at, 4 * LANES * v)) for v in range(vectors)]
                for row in range(rows):
                    weight = c.at(c.at(first, c.times(weights_row, row)), c.times(index, PAIR))
                    for v in range(vectors):
                        sums[row * vectors + v] = c.dot_pairs(sums[row * vectors + v], pairs[v], weight)
                return sums

            return c.loop(constant(BLOCK // 2), carried, pair)

        sums = c.loop(blocks, [ZEROS] * (rows * vectors), block)
        for row in range(rows):
            for v in range(vectors):
                c.store(sums[row * vectors + v], c.at(c.at(out, c.times(out_row, row)), 4 * LANES * v))

    return mixture


_as_query = bfloat if HAS_BFLOAT else inner(lambda x: x)
_scores1, _scores2, _scores3, _scores4 = (_scores(rows) for rows in (1, 2, 3, 4))
_wide1, _wide2, _wide3, _wide4 = (_mixture(rows, 4) for rows in (1, 2, 3, 4))
_narrow1, _narrow2, _narrow3, _narrow4 = (_mixture(rows, 1) for rows in (1, 2, 3, 4))


@inner
def as_query(x):  # type: ignore[no-untyped-def]
    """Returns a number as queries are stored."""
    return _as_query(x)


@inner
def _all_scores(query, rows, keys, table, blocks, block_bytes, out):  # type: ignore[no-untyped-def]
    """Writes [rows, 16 * blocks] scores; the table holds the numbers of the blocks."""
    q, q_row, o, o_row = query.ctypes.data, query.itemsize * query.shape[1], out.ctypes.data, 4 * out.shape[1]
    quads = query.shape[1] // 4
    for index in range(blocks):
        block = keys + np.int64(table[index]) * block_bytes
        row = 0
        while row < rows:
            q_at, o_at = q + row * q_row, o + row * o_row + 64 * index
            if rows - row >= 4:
                _scores4(q_at, q_row, block, quads, o_at, o_row)
            elif rows - row == 3:
                _scores3(q_at, q_row, block, quads, o_at, o_row)
            elif rows - row == 2:
                _scores2(q_at, q_row, block, quads, o_at, o_row)
            else:
                _scores1(q_at, q_row, block, quads, o_at, o_row)
            row += 4


@inner
def _all_mixtures(weights, rows, values, table, blocks, block_bytes, out):  # type: ignore[no-untyped-def]
    """Writes [rows, head_dim] sums."""
    w, w_row, o, o_row, t = (
        weights.ctypes.data,
        4 * weights.shape[1],
        out.ctypes.data,
        4 * out.shape[1],
        table.ctypes.data,
    )
    width = out.shape[1]
    pair = 4 * width
    row = 0
    while row < rows:
        w_at, left, first = w + row * w_row, rows - row, 0
        while first < width:
            o_at, v_at = o + row * o_row + 4 * first, values + 4 * first
            wide = width - first >= 64
            if left >= 4:
                if wide:
                    _wide4(w_at, w_row, v_at, t, blocks, block_bytes, pair, o_at, o_row)
                else:
                    _narrow4(w_at, w_row, v_at, t, blocks, block_bytes, pair, o_at, o_row)
            elif left == 3:
                if wide:
                    _wide3(w_at, w_row, v_at, t, blocks, block_bytes, pair, o_at, o_row)
                else:
                    _narrow3(w_at, w_row, v_at, t, blocks, block_bytes, pair, o_at, o_row)
            elif left == 2:
                if wide:
                    _wide2(w_at, w_row, v_at, t, blocks, block_bytes, pair, o_at, o_row)
                else:
                    _narrow2(w_at, w_row, v_at, t, blocks, block_bytes, pair, o_at, o_row)
            elif wide:
                _wide1(w_at, w_row, v_at, t, blocks, block_bytes, pair, o_at, o_row)
            else:
                _narrow1(w_at, w_row, v_at, t, blocks, block_bytes, pair, o_at, o_row)
            first += 64 if wide else 16
        row += 4


@kernel(6)
def _soften(c: Code, scores: Any, blocks: Any, first: Any, last: Any, cap: Any, out: Any) -> None:
    """Makes scores[first:last] weights, e ** (score - maximum), and the others 0; writes the maximum and the sum.

    The weights take the place of the scores, packed where they are bfloat16.

    Args:
        cap: address of what scores are capped at, c * tanh(score / c); 0 there is no cap.
        out: address of the two numbers.
    """
    b = c.b
    nothing, zero = ir.Constant(FLOATS, [float("-inf")] * LANES), ZEROS
    lowest, end = c.splat(b.trunc(first, I32)), c.splat(b.trunc(last, I32))
    limit = c.load(F32, cap)
    two, one = (ir.Constant(FLOATS, [float(number)] * LANES) for number in (2, 1))

    def seen(index: Any) -> Any:
        place = c.lanes(c.times(index, LANES))
        return b.and_(b.icmp_signed(">=", place, lowest), b.icmp_signed("<", place, end))

    def capped(index: Any, carried: list[Any]) -> list[Any]:
        at = c.at(scores, c.times(index, 4 * LANES))
        ratio = b.fdiv(c.load(FLOATS, at), c.splat(limit))
        turned = c.exponential(b.fmul(ratio, ir.Constant(FLOATS, [-2.0] * LANES)))
        c.store(b.fmul(c.splat(limit), b.fsub(b.fdiv(two, b.fadd(one, turned)), one)), at)
        return carried

    def largest(index: Any, carried: list[Any]) -> list[Any]:
        score = b.select(seen(index), c.load(FLOATS, c.at(scores, c.times(index, 4 * LANES))), nothing)
        return [c.larger(score, carried[0])]

    def weigh(index: Any, carried: list[Any]) -> list[Any]:
        at = c.at(scores, c.times(index, 4 * LANES))
        weight = c.weight(b.fsub(c.load(FLOATS, at), top))
        weight = b.select(seen(index), weight, zero)
        c.store_numbers(weight, c.at(scores, c.times(index, PAIR * LANES // 2)))
        return [b.fadd(carried[0], weight)]

    with b.if_then(b.fcmp_ordered(">", limit, ir.Constant(F32, 0.0))):
        c.loop(blocks, [], capped)
    maximum = c.folded(c.loop(blocks, [nothing], largest)[0], c.larger)
    top = c.splat(maximum)
    total = c.folded(c.loop(blocks, [zero], weigh)[0], b.fadd)
    c.store(maximum, out)
    c.store(total, c.at(out, 4))


@inner
def attend_span(  # type: ignore[no-untyped-def]
    query, rows, group, position, window, cap, span, keys, values, table, block_bytes, scores, totals, out
):
    """Attends to one span of 256 positions: writes each row's sum of weighted values.

    Args:
        query: [rows and more, head_dim] QUERY_TYPE, rotated and scaled: `group` heads of each token.
        position: of the first token.
        window: tokens that a token sees, itself included; 0 is all.
        cap: [1] float32: of the scores, 0 where there is none.
        keys, values: addresses of block 0 of this head.
        table: [blocks of the request] int32.
        scores: [rows and more, SPAN] to work in.
        totals: [rows and more, 2] gets each row's maximum and the sum of its weights; -inf and 0 where it sees nothing.
    """
    start = span * SPAN
    tokens = rows // group
    reach = min(SPAN, position + tokens - start)
    blocks = (reach + BLOCK - 1) // BLOCK
    own = table[start // BLOCK :]
    _all_scores(query, rows, keys, own, blocks, block_bytes, scores)
    for row in range(rows):
        at = position + row // group
        first = max(at - window + 1 - start, 0) if window > 0 else 0
        last = min(at + 1 - start, SPAN)
        _soften(scores[row].ctypes.data, blocks, first, last, cap.ctypes.data, totals[row].ctypes.data)
    _all_mixtures(scores, rows, values, own, blocks, block_bytes, out)


@inner
def merge(totals, mixed, more_totals, more):  # type: ignore[no-untyped-def]
    """Adds a span to what earlier spans gave a row, in place; the first one is taken as it is."""
    if totals[1] == np.float32(0):
        totals[0], totals[1] = more_totals[0], more_totals[1]
        for i in range(mixed.size):
            mixed[i] = more[i]
    elif more_totals[1] != np.float32(0):
        largest = max(totals[0], more_totals[0])
        old, new = exponential(totals[0] - largest), exponential(more_totals[0] - largest)
        for i in range(mixed.size):
            mixed[i] = mixed[i] * old + more[i] * new
        totals[0], totals[1] = largest, totals[1] * old + more_totals[1] * new


@inner
def write_token(key, value, keys, values, slot, alone):  # type: ignore[no-untyped-def]
    """Writes one head's key and value of a token to its slot.

    Args:
        key, value: [head_dim] float32.
        keys, values: [head_dim * 16] int16: the block.
        alone: the slots after this one are cleared. What another request left there may be no number, and even
            with a weight of 0 would spoil the sum.
    """
    for i in range(key.size):
        keys[(i // 2) * 2 * BLOCK + 2 * slot + i % 2] = bfloat(key[i])
        values[(slot // 2 * value.size + i) * 2 + slot % 2] = bfloat(value[i])
    if alone:
        for later in range(slot + 1, BLOCK):
            for i in range(key.size):
                keys[(i // 2) * 2 * BLOCK + 2 * later + i % 2] = 0
                values[(later // 2 * value.size + i) * 2 + later % 2] = 0
