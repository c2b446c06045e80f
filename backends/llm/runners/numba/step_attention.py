"""The attention of a step: which thread attends to what, keys and values into their blocks, spans put together."""

from __future__ import annotations

import numpy as np
from numba import carray, types

from backends.llm.runners.numba.attention import (
    BLOCK,
    SPAN,
    TILE_ROWS,
    as_query,
    attend_span,
    merge,
    write_token,
)
from backends.llm.runners.numba.compiling import inner, outer
from backends.llm.runners.numba.rows import norm, rotate
from backends.llm.runners.numba.threads import next_task, task_done, wait_for_phase
from backends.llm.runners.numba.vectors import pointer_to

# Places of Step.counts: numbers, and addresses and bytes of the cache.
ROWS, LOGITS, ITEMS, LAST_ITEMS, KEYS, VALUES, LOGITS_AT, LAYER_BYTES, THREADS = range(9)
_halves_at = pointer_to(types.int16)


@outer
def plan_attention(shape, step, requests, max_parts):  # type: ignore[no-untyped-def]
    """Divides the attention of a step into items, those of a single token by spans.

    In the last layer only the tokens that get logits attend, each an item of its own: they are a second list.
    """
    group = shape.heads // shape.kv_heads
    tile = max(1, TILE_ROWS // group)
    count = 0
    for request in range(requests):
        first, last = step.begins[request], step.begins[request + 1]
        spans = step.positions[last - 1] // SPAN + 1
        apart = last - first == 1 and spans > 1 and count + shape.kv_heads * spans <= max_parts
        for row in range(first, last):
            step.request_of[row] = request
            step.first_part[row] = count if apart else -1
        if apart:
            count = _by_spans(shape, step.items, count, first, request, count, spans)
        else:
            for row in range(first, last, tile):
                for head in range(shape.kv_heads):
                    _item(step.items[count], row, min(tile, last - row), head, request, -1, -1)
                    count += 1
    step.counts[ITEMS] = count
    logits = step.counts[LOGITS]
    if logits < step.counts[ROWS]:
        for index in range(logits):
            row = step.logits_rows[index]
            request, part = step.request_of[row], step.first_part[row]
            if part >= 0:
                count = _by_spans(shape, step.items, count, row, request, part, step.positions[row] // SPAN + 1)
            else:
                for head in range(shape.kv_heads):
                    _item(step.items[count], row, 1, head, request, -1, -1)
                    count += 1
    step.counts[LAST_ITEMS] = count - step.counts[ITEMS]


@inner
def _by_spans(shape, items, count, row, request, part, spans):  # type: ignore[no-untyped-def]
    for head in range(shape.kv_heads):
        for span in range(spans):
            _item(items[count], row, 1, head, request, span, part + head * spans + span)
            count += 1
    return count


@inner
def _item(item, row, tokens, head, request, span, part):  # type: ignore[no-untyped-def]
    item[0], item[1], item[2], item[3], item[4], item[5] = row, tokens, head, request, span, part


@inner
def rotate_and_write(shape, model, step, layer, row):  # type: ignore[no-untyped-def]
    """Adds biases, norms and rotates queries and keys, scales queries, writes keys and values into their blocks."""
    width, heads, kv_heads = shape.head_dim, shape.heads, shape.kv_heads
    which = 1 if model.windows[layer] else 0
    bias = model.matrices[4 * layer, 4]
    block_size = width * BLOCK
    qkv = step.qkv[row]
    if bias >= 0:
        for i in range(qkv.size):
            qkv[i] += model.biases[bias, i]
    cos, sin = step.cos[which, row], step.sin[which, row]
    for head in range(heads + kv_heads):
        part = qkv[head * width : (head + 1) * width]
        if shape.qk_norm:
            norm(part, model.head_norms[layer, 0 if head < heads else 1], shape.eps, part)
        rotate(part, cos, sin)
        if head < heads:
            for i in range(width):
                part[i] *= shape.query_scale
    position = step.positions[row]
    request = step.request_of[row]
    block = step.tables[step.table_begins[request] + position // BLOCK]
    # The last of its request, and the first in its block or perhaps so.
    alone = row == step.begins[request + 1] - 1
    alone = alone and (position % BLOCK == 0 or row > step.begins[request])
    for head in range(kv_heads):
        key = qkv[(heads + head) * width : (heads + head + 1) * width]
        value = qkv[(heads + kv_heads + head) * width : (heads + kv_heads + head + 1) * width]
        place = layer * step.counts[LAYER_BYTES] + 2 * block_size * (np.int64(block) * kv_heads + head)
        keys = carray(_halves_at(step.counts[KEYS] + place), (block_size,))
        values = carray(_halves_at(step.counts[VALUES] + place), (block_size,))
        write_token(key, value, keys, values, position % BLOCK, alone)


@inner
def attend(shape, model, step, scratch, phase, layer, first, tasks):  # type: ignore[no-untyped-def]
    """Computes items `first` and more, so many of them."""
    thread, threads = scratch.thread, step.counts[THREADS]
    task = next_task(step.counters, phase, tasks, thread, threads)
    while task >= 0:
        _attend_item(shape, model, step, scratch, layer, step.items[first + task])
        task_done(step.counters, phase, threads)
        task = next_task(step.counters, phase, tasks, thread, threads)
    wait_for_phase(step.counters, phase, tasks, threads)


@inner
def _attend_item(shape, model, step, scratch, layer, item):  # type: ignore[no-untyped-def]
    row, tokens, head, request = item[0], item[1], np.int64(item[2]), item[3]
    only, part = np.int64(item[4]), item[5]
    group, width = shape.heads // shape.kv_heads, shape.head_dim
    rows, position, window = tokens * group, np.int64(step.positions[row]), model.windows[layer]
    for token in range(tokens):
        for member in range(group):
            start = (head * group + member) * width
            query = scratch.query[token * group + member]
            source = step.qkv[row + token]
            for i in range(width):
                query[i] = as_query(source[start + i])
    block_bytes = 2 * width * BLOCK * shape.kv_heads
    place = layer * step.counts[LAYER_BYTES] + 2 * width * BLOCK * head
    keys, values = step.counts[KEYS] + place, step.counts[VALUES] + place
    table = step.tables[step.table_begins[request] :]
    first = max(position - window + 1, 0) // SPAN if window else np.int64(0)
    if only >= 0:
        if only < first:
            step.part_totals[part] = 0
        else:
            attend_span(
                scratch.query, rows, group, position, window, model.softcap, only, keys, values, table, block_bytes,
                scratch.scores, step.part_totals[part], step.parts[part],
            )  # fmt: skip
        return
    for one in range(rows):
        scratch.totals[one, 1] = 0
    for span in range(first, (position + tokens - 1) // SPAN + 1):
        attend_span(
            scratch.query, rows, group, position, window, model.softcap, span, keys, values, table, block_bytes,
            scratch.scores, scratch.span_totals, scratch.span_mixed,
        )  # fmt: skip
        for one in range(rows):
            merge(scratch.totals[one], scratch.mixed[one], scratch.span_totals[one], scratch.span_mixed[one])
    for one in range(rows):
        start = (head * group + one % group) * width
        _divide(scratch.mixed[one], scratch.totals[one, 1], step.attended[row + one // group, start : start + width])


@inner
def _divide(mixed, total, out):  # type: ignore[no-untyped-def]
    for i in range(out.size):
        out[i] = mixed[i] / total


@inner
def merge_parts(shape, step, scratch, row):  # type: ignore[no-untyped-def]
    """Merges the spans of a token that were computed apart, in their order."""
    group, width = shape.heads // shape.kv_heads, shape.head_dim
    spans = step.positions[row] // SPAN + 1
    for head in range(shape.heads):
        first = step.first_part[row] + head // group * spans
        scratch.totals[0, 1] = 0
        for part in range(first, first + spans):
            member = head % group
            merge(scratch.totals[0], scratch.mixed[0], step.part_totals[part, member], step.parts[part, member])
        _divide(scratch.mixed[0], scratch.totals[0, 1], step.attended[row, head * width : (head + 1) * width])
