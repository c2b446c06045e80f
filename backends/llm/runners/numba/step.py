"""One step of the decoder, as every thread computes its share of it: phases of tasks, without a word of Python.

A layer is ten phases: four products, attention, and what is done to each row between them. See `decoder.py` for the
same model in torch.
"""

from __future__ import annotations

import numpy as np
from numba import carray, types

from backends.llm.runners.numba.compiling import inner, outer
from backends.llm.runners.numba.product import product
from backends.llm.runners.numba.rows import gated, norm, to_bytes
from backends.llm.runners.numba.step_attention import (
    ITEMS,
    LAST_ITEMS,
    LOGITS,
    LOGITS_AT,
    ROWS,
    THREADS,
    attend,
    merge_parts,
    rotate_and_write,
)
from backends.llm.runners.numba.threads import add_one, next_task, read, sleep_while, task_done, wait_for_phase
from backends.llm.runners.numba.vectors import pointer_to, uncounted

# Cells by which steps begin and end.
STARTED, LEFT, STOPPED = 0, 8, 16
# What is done to each row. In an array, because numba would compile for each constant.
_BEFORE_ATTENTION, _ROTATION, _AFTER_ATTENTION, _BEFORE_MLP, _ACTIVATION, _BEFORE_HEAD = range(6)
_KINDS = np.arange(6)
_ROWS_OF_A_TASK = 64
_bytes_at, _floats_at = pointer_to(types.uint8), pointer_to(types.float32)


@inner
def _multiply(step, scratch, phase, matrix, rows, out, out_row):  # type: ignore[no-untyped-def]
    """Multiplies the bytes of all rows with a matrix: in tasks of some rows where there are many, else of columns."""
    thread, threads = scratch.thread, step.counts[THREADS]
    columns, group, pairs = matrix[3], matrix[5], matrix[2] // 64
    many = rows >= _ROWS_OF_A_TASK * threads
    size = _ROWS_OF_A_TASK if many else max(1, pairs // (8 * threads))
    tasks = ((rows if many else pairs) + size - 1) // size
    x, scales, totals = step.codes.ctypes.data, step.scales.ctypes.data, step.totals.ctypes.data
    row, count, first, last = np.int64(0), rows, np.int64(0), pairs
    task = next_task(step.counters, phase, tasks, thread, threads)
    while task >= 0:
        if many:
            row, count = size * task, min(size, rows - size * task)
        else:
            first, last = size * task, min(size * (task + 1), pairs)
        product(
            matrix[0], matrix[1], columns, group, x + row * columns, scales + 4 * row * (columns // group),
            totals + 4 * row, count, first, last, out + row * out_row, out_row,
        )  # fmt: skip
        task_done(step.counters, phase, threads)
        task = next_task(step.counters, phase, tasks, thread, threads)
    wait_for_phase(step.counters, phase, tasks, threads)


@inner
def _each(shape, model, step, scratch, phase, kind, layer, rows, few):  # type: ignore[no-untyped-def]
    """Does one kind of work to all rows, or to the few that get logits, which then stand together."""
    thread, threads = scratch.thread, step.counts[THREADS]
    size = max(1, min(16, rows // (8 * threads)))
    tasks = (rows + size - 1) // size
    task = next_task(step.counters, phase, tasks, thread, threads)
    while task >= 0:
        for place in range(size * task, min(size * (task + 1), rows)):
            row = np.int64(step.logits_rows[place]) if few else place
            if kind == _BEFORE_ATTENTION:
                _before_attention(shape, model, step, scratch, layer, row)
            elif kind == _ROTATION:
                rotate_and_write(shape, model, step, layer, row)
            elif kind == _AFTER_ATTENTION:
                if step.first_part[row] >= 0:
                    merge_parts(shape, step, scratch, row)
                _bytes(step, step.attended[row], place, model.matrices[4 * layer + 1])
            elif kind == _BEFORE_MLP:
                _into_hidden(shape, step, scratch, place, row, model.norms[layer, 1])
                _norm_to_bytes(shape, step, scratch, row, place, model.norms[layer, 2], model.matrices[4 * layer + 2])
            elif kind == _ACTIVATION:
                width = shape.intermediate
                active = scratch.row[:width]
                gated(step.gate_up[place, :width], step.gate_up[place, width : 2 * width], shape.gelu, active)
                _bytes(step, active, place, model.matrices[4 * layer + 3])
            else:
                _into_hidden(shape, step, scratch, place, row, model.norms[layer - 1, 3])
                _norm_to_bytes(shape, step, scratch, row, place, model.final_norm, model.matrices[4 * layer])
        task_done(step.counters, phase, threads)
        task = next_task(step.counters, phase, tasks, thread, threads)
    wait_for_phase(step.counters, phase, tasks, threads)


@inner
def _before_attention(shape, model, step, scratch, layer, row):  # type: ignore[no-untyped-def]
    if layer:
        _into_hidden(shape, step, scratch, row, row, model.norms[layer - 1, 3])
    else:
        _embed(shape, model.matrices[4 * shape.layers + 1], step.ids[row], step.hidden[row])
    _norm_to_bytes(shape, step, scratch, row, row, model.norms[layer, 0], model.matrices[4 * layer])


@inner
def _into_hidden(shape, step, scratch, place, row, norms):  # type: ignore[no-untyped-def]
    """Adds what attention or the MLP gave to the hidden row, through its own norm where the model has one."""
    added = step.added[place, : shape.hidden]
    if shape.post_norms:
        added = scratch.row[: shape.hidden]
        norm(step.added[place, : shape.hidden], norms, shape.eps, added)
    hidden = step.hidden[row]
    for i in range(shape.hidden):
        hidden[i] += added[i]


@inner
def _norm_to_bytes(shape, step, scratch, row, place, weight, matrix):  # type: ignore[no-untyped-def]
    normed = scratch.row[: shape.hidden]
    norm(step.hidden[row], weight, shape.eps, normed)
    _bytes(step, normed, place, matrix)


@inner
def _bytes(step, row, place, matrix):  # type: ignore[no-untyped-def]
    """Makes a row the bytes at a place of the next product, which is with this matrix."""
    columns, group = matrix[3], matrix[5]
    codes = step.codes[place * columns : (place + 1) * columns]
    groups = columns // group
    step.totals[place] = to_bytes(row, group, codes, step.scales[place * groups : (place + 1) * groups])


@inner
def _embed(shape, matrix, token, out):  # type: ignore[no-untyped-def]
    """Writes a row of the packed embedding."""
    columns = matrix[3]
    codes = carray(_bytes_at(matrix[0]), (matrix[2] // 32, columns // 4, 32, 4))
    factors = carray(_floats_at(matrix[1]), (matrix[2] // 16, 2, 16))
    panel, place = token // 32, token % 32
    scale, zero = factors[token // 16, 0, token % 16], factors[token // 16, 1, token % 16]
    scale *= shape.embedding_scale
    for four in range(shape.hidden // 4):
        for i in range(4):
            out[4 * four + i] = (np.float32(codes[panel, four, place, i]) - zero) * scale


@outer
def take_part(shape, model, step, scratch, cells, helper):  # type: ignore[no-untyped-def]
    """Computes this thread's share of a step; when it returns, the whole step is computed.

    A helper does so for every step that is started, until `cells` says stop. No lock of Python's is held.
    """
    model, step, scratch = uncounted(model), uncounted(step), uncounted(scratch)
    at, steps = cells.ctypes.data, 0
    qkv, added, gate_up = (
        np.int64(step.qkv.ctypes.data),
        np.int64(step.added.ctypes.data),
        np.int64(step.gate_up.ctypes.data),
    )
    while True:
        if helper:
            sleep_while(at + 8 * STARTED, steps)
            if read(at + 8 * STOPPED):
                return
        rows, logits, phase = step.counts[ROWS], step.counts[LOGITS], np.int64(0)
        first, items, few = np.int64(0), step.counts[ITEMS], rows < 0
        for layer in range(shape.layers):
            matrices = model.matrices[4 * layer : 4 * layer + 4]
            _each(shape, model, step, scratch, phase, _KINDS[_BEFORE_ATTENTION], layer, rows, few)
            _multiply(step, scratch, phase + 1, matrices[0], rows, qkv, 4 * step.qkv.shape[1])
            _each(shape, model, step, scratch, phase + 2, _KINDS[_ROTATION], layer, rows, few)
            if layer == shape.layers - 1 and logits < rows:
                # Nobody attends to what the other tokens become after the last keys and values.
                few, rows = True, logits
                first, items = items, step.counts[LAST_ITEMS]
            if rows:
                attend(shape, model, step, scratch, phase + 3, layer, first, items)
                _each(shape, model, step, scratch, phase + 4, _KINDS[_AFTER_ATTENTION], layer, rows, few)
                _multiply(step, scratch, phase + 5, matrices[1], rows, added, 4 * step.added.shape[1])
                _each(shape, model, step, scratch, phase + 6, _KINDS[_BEFORE_MLP], layer, rows, few)
                _multiply(step, scratch, phase + 7, matrices[2], rows, gate_up, 4 * step.gate_up.shape[1])
                _each(shape, model, step, scratch, phase + 8, _KINDS[_ACTIVATION], layer, rows, few)
                _multiply(step, scratch, phase + 9, matrices[3], rows, added, 4 * step.added.shape[1])
            phase += 10
        if logits:
            head = model.matrices[4 * shape.layers]
            _each(shape, model, step, scratch, phase, _KINDS[_BEFORE_HEAD], shape.layers, logits, few)
            _multiply(step, scratch, phase + 1, head, logits, step.counts[LOGITS_AT], 4 * head[2])
        if not helper:
            return
        steps += 1
        add_one(at + 8 * LEFT)
