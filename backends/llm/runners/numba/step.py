"""One step of the decoder, as every thread computes its share of it: phases of tasks, without a word of Python.

A layer is ten phases: norm, product, rotation and cache, attention, bytes, product, norm, product, activation,
product (the norm is one phase with what comes before it). See `decoder.py` for the same model in torch.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit, types
from numba.extending import intrinsic

from backends.llm.runners.numba.attention import BLOCK, SPAN, TILE_ROWS, as_query, attend_span, merge, write_token
from backends.llm.runners.numba.compiling import inner, outer
from backends.llm.runners.numba.product import product
from backends.llm.runners.numba.rows import gated, norm, rotate, to_bytes
from backends.llm.runners.numba.threads import add_one, next_task, read, sleep_while, task_done, wait_for_phase
from backends.llm.runners.numba.vectors import uncounted

ROWS, LOGITS, ITEMS, KEYS, VALUES, LOGITS_AT, LAYER_BYTES, THREADS = range(8)
# Of the cells by which steps begin and end.
STARTED, LEFT, STOPPED = 0, 8, 16


@outer
def plan_attention(shape, step, requests, max_parts):  # type: ignore[no-untyped-def]
    """Divides the attention of a step into items, those of a single token by spans; returns how many there are."""
    tile = max(1, TILE_ROWS // (shape.heads // shape.kv_heads))
    count = 0
    for request in range(requests):
        first, last = step.begins[request], step.begins[request + 1]
        spans = step.positions[last - 1] // SPAN + 1
        apart = last - first == 1 and spans > 1 and count + shape.kv_heads * spans <= max_parts
        for row in range(first, last):
            step.request_of[row] = request
            step.first_part[row] = count if apart else -1
        for head in range(shape.kv_heads):
            if apart:
                for span in range(spans):
                    _item(step.items[count], first, 1, head, request, span)
                    count += 1
            else:
                for row in range(first, last, tile):
                    _item(step.items[count], row, min(tile, last - row), head, request, -1)
                    count += 1
    return count


@njit(inline="always")
def _item(item, row, tokens, head, request, span):  # type: ignore[no-untyped-def]
    item[0], item[1], item[2], item[3], item[4] = row, tokens, head, request, span


@inner
def _multiply(step, phase, matrix, rows, out, out_row):  # type: ignore[no-untyped-def]
    """Multiplies the bytes of all rows with a matrix, in tasks of some columns."""
    columns, pairs = matrix[3], matrix[2] // 64
    size = max(1, pairs // (8 * step.counts[THREADS]))
    tasks = (pairs + size - 1) // size
    x, scales, totals = step.codes.ctypes.data, step.scales.ctypes.data, step.totals.ctypes.data
    task = next_task(step.counters, phase, tasks)
    while task >= 0:
        last = min(size * (task + 1), pairs)
        product(matrix[0], matrix[1], columns, x, scales, totals, rows, size * task, last, out, out_row)
        task_done(step.counters, phase)
        task = next_task(step.counters, phase, tasks)
    wait_for_phase(step.counters, phase, tasks)


@inner
def _bytes(step, row, place, columns):  # type: ignore[no-untyped-def]
    """Makes a row the bytes at a place of the next product, whose matrix has so many columns."""
    codes = step.codes[place * columns : (place + 1) * columns]
    groups = columns // 64
    step.totals[place] = to_bytes(row, codes, step.scales[place * groups : (place + 1) * groups])


@inner
def _embed(shape, matrix, token, out):  # type: ignore[no-untyped-def]
    """Writes a row of the packed embedding."""
    columns = matrix[3]
    codes = carray(_bytes_at(matrix[0]), (matrix[2] // 32, columns // 4, 32, 4))
    factors = carray(_floats_at(matrix[1]), (matrix[2] // 16, 2, 16))
    panel, place = token // 32, token % 32
    scale, zero = factors[token // 16, 0, token % 16], factors[token // 16, 1, token % 16]
    for i in range(shape.hidden):
        out[i] = (np.float32(codes[panel, i // 4, place, i % 4]) - zero) * scale * shape.embedding_scale


@intrinsic
def _bytes_at(context, address):  # type: ignore[no-untyped-def]
    pointer = types.CPointer(types.uint8)
    return pointer(types.int64), lambda c, b, s, a: b.inttoptr(a[0], c.get_value_type(pointer))


@intrinsic
def _floats_at(context, address):  # type: ignore[no-untyped-def]
    pointer = types.CPointer(types.float32)
    return pointer(types.int64), lambda c, b, s, a: b.inttoptr(a[0], c.get_value_type(pointer))


@intrinsic
def _halves_at(context, address):  # type: ignore[no-untyped-def]
    pointer = types.CPointer(types.int16)
    return pointer(types.int64), lambda c, b, s, a: b.inttoptr(a[0], c.get_value_type(pointer))


@inner
def _into_hidden(shape, step, scratch, row, norms):  # type: ignore[no-untyped-def]
    """Adds what attention or the MLP gave to the hidden row, through its own norm where the model has one."""
    added = step.added[row, : shape.hidden]
    if shape.post_norms:
        added = scratch.row[: shape.hidden]
        norm(step.added[row, : shape.hidden], norms, shape.eps, added)
    hidden = step.hidden[row]
    for i in range(shape.hidden):
        hidden[i] += added[i]


@inner
def _begin_layer(shape, model, step, scratch, phase, layer, rows):  # type: ignore[no-untyped-def]
    size = 4 if rows >= 32 else 1
    tasks = (rows + size - 1) // size
    task = next_task(step.counters, phase, tasks)
    while task >= 0:
        for row in range(size * task, min(size * (task + 1), rows)):
            if layer:
                _into_hidden(shape, step, scratch, row, model.norms[layer - 1, 3])
            else:
                _embed(shape, model.matrices[4 * shape.layers + 1], step.ids[row], step.hidden[row])
            normed = scratch.row[: shape.hidden]
            norm(step.hidden[row], model.norms[layer, 0], shape.eps, normed)
            _bytes(step, normed, row, model.matrices[4 * layer, 3])
        task_done(step.counters, phase)
        task = next_task(step.counters, phase, tasks)
    wait_for_phase(step.counters, phase, tasks)


@inner
def _rotate_and_write(shape, model, step, phase, layer, rows):  # type: ignore[no-untyped-def]
    """Adds biases, norms and rotates queries and keys, scales queries, writes keys and values into their blocks."""
    width, heads, kv_heads = shape.head_dim, shape.heads, shape.kv_heads
    which = 1 if model.windows[layer] else 0
    bias = model.matrices[4 * layer, 4]
    block_size = width * BLOCK
    size = 4 if rows >= 32 else 1
    tasks = (rows + size - 1) // size
    task = next_task(step.counters, phase, tasks)
    while task >= 0:
        for row in range(size * task, min(size * (task + 1), rows)):
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
        task_done(step.counters, phase)
        task = next_task(step.counters, phase, tasks)
    wait_for_phase(step.counters, phase, tasks)


@inner
def _attend(shape, model, step, scratch, phase, layer):  # type: ignore[no-untyped-def]
    tasks = step.counts[ITEMS]
    task = next_task(step.counters, phase, tasks)
    while task >= 0:
        _attend_item(shape, model, step, scratch, layer, task)
        task_done(step.counters, phase)
        task = next_task(step.counters, phase, tasks)
    wait_for_phase(step.counters, phase, tasks)


@inner
def _attend_item(shape, model, step, scratch, layer, index):  # type: ignore[no-untyped-def]
    item = step.items[index]
    row, tokens, head, request, only = item[0], item[1], np.int64(item[2]), item[3], np.int64(item[4])
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
            step.part_totals[index] = 0
        else:
            attend_span(
                scratch.query, rows, group, position, window, model.softcap, only, keys, values, table, block_bytes,
                scratch.scores, step.part_totals[index], step.parts[index],
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
def _merge_parts(shape, step, scratch, row):  # type: ignore[no-untyped-def]
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


@inner
def _finish_attention(shape, model, step, scratch, phase, layer, rows):  # type: ignore[no-untyped-def]
    size = 4 if rows >= 32 else 1
    tasks = (rows + size - 1) // size
    task = next_task(step.counters, phase, tasks)
    while task >= 0:
        for row in range(size * task, min(size * (task + 1), rows)):
            if step.first_part[row] >= 0:
                _merge_parts(shape, step, scratch, row)
            _bytes(step, step.attended[row], row, model.matrices[4 * layer + 1, 3])
        task_done(step.counters, phase)
        task = next_task(step.counters, phase, tasks)
    wait_for_phase(step.counters, phase, tasks)


@inner
def _begin_mlp(shape, model, step, scratch, phase, layer, rows):  # type: ignore[no-untyped-def]
    size = 4 if rows >= 32 else 1
    tasks = (rows + size - 1) // size
    task = next_task(step.counters, phase, tasks)
    while task >= 0:
        for row in range(size * task, min(size * (task + 1), rows)):
            _into_hidden(shape, step, scratch, row, model.norms[layer, 1])
            normed = scratch.row[: shape.hidden]
            norm(step.hidden[row], model.norms[layer, 2], shape.eps, normed)
            _bytes(step, normed, row, model.matrices[4 * layer + 2, 3])
        task_done(step.counters, phase)
        task = next_task(step.counters, phase, tasks)
    wait_for_phase(step.counters, phase, tasks)


@inner
def _activate(shape, model, step, scratch, phase, layer, rows):  # type: ignore[no-untyped-def]
    width = shape.intermediate
    size = 4 if rows >= 32 else 1
    tasks = (rows + size - 1) // size
    task = next_task(step.counters, phase, tasks)
    while task >= 0:
        for row in range(size * task, min(size * (task + 1), rows)):
            active = scratch.row[:width]
            gated(step.gate_up[row, :width], step.gate_up[row, width : 2 * width], shape.gelu, active)
            _bytes(step, active, row, model.matrices[4 * layer + 3, 3])
        task_done(step.counters, phase)
        task = next_task(step.counters, phase, tasks)
    wait_for_phase(step.counters, phase, tasks)


@inner
def _begin_head(shape, model, step, scratch, phase):  # type: ignore[no-untyped-def]
    """The last norm, of the rows alone that get logits."""
    tasks = step.counts[LOGITS]
    task = next_task(step.counters, phase, tasks)
    while task >= 0:
        row = np.int64(step.logits_rows[task])
        _into_hidden(shape, step, scratch, row, model.norms[shape.layers - 1, 3])
        normed = scratch.row[: shape.hidden]
        norm(step.hidden[row], model.final_norm, shape.eps, normed)
        _bytes(step, normed, task, model.matrices[4 * shape.layers, 3])
        task_done(step.counters, phase)
        task = next_task(step.counters, phase, tasks)
    wait_for_phase(step.counters, phase, tasks)


@outer
def take_part(shape, model, step, scratch, cells, helper):  # type: ignore[no-untyped-def]
    """Computes this thread's share of a step; when it returns, the whole step is computed.

    A helper does so for every step that is started, until `cells` says stop. No lock of Python's is held.
    """
    model, step, scratch = uncounted(model), uncounted(step), uncounted(scratch)
    at, steps = cells.ctypes.data, 0
    while True:
        if helper:
            sleep_while(at + 8 * STARTED, steps)
            if read(at + 8 * STOPPED):
                return
        rows, phase = step.counts[ROWS], np.int64(0)
        for layer in range(shape.layers):
            matrices = model.matrices[4 * layer : 4 * layer + 4]
            _begin_layer(shape, model, step, scratch, phase, layer, rows)
            _multiply(step, phase + 1, matrices[0], rows, np.int64(step.qkv.ctypes.data), 4 * step.qkv.shape[1])
            _rotate_and_write(shape, model, step, phase + 2, layer, rows)
            _attend(shape, model, step, scratch, phase + 3, layer)
            _finish_attention(shape, model, step, scratch, phase + 4, layer, rows)
            _multiply(step, phase + 5, matrices[1], rows, np.int64(step.added.ctypes.data), 4 * step.added.shape[1])
            _begin_mlp(shape, model, step, scratch, phase + 6, layer, rows)
            _multiply(step, phase + 7, matrices[2], rows, np.int64(step.gate_up.ctypes.data), 4 * step.gate_up.shape[1])
            _activate(shape, model, step, scratch, phase + 8, layer, rows)
            _multiply(step, phase + 9, matrices[3], rows, np.int64(step.added.ctypes.data), 4 * step.added.shape[1])
            phase += 10
        logits = step.counts[LOGITS]
        if logits:
            head = model.matrices[4 * shape.layers]
            _begin_head(shape, model, step, scratch, phase)
            _multiply(step, phase + 1, head, logits, step.counts[LOGITS_AT], 4 * head[2])
        if not helper:
            return
        steps += 1
        add_one(at + 8 * LEFT)
