"""Batch-invariant mode: the logits of a token are the same to the bit, however its step was put together."""

from __future__ import annotations

import numpy as np
import pytest

from backends.llm.engine.outputs import RequestId, ScheduledRequest, SchedulerOutput
from backends.llm.loaders import load_model
from backends.llm.runners.cpu_options import CpuOptions
from backends.llm.runners.openvino import OpenVinoRunner
from backends.llm.runners.step_inputs import one_by_one

LENGTHS = (40, 7, 33, 20)


@pytest.fixture(scope="module", params=[True, False], ids=["exact", "fast"])
def runner(request, smollm2):
    options = CpuOptions(exact=request.param, batch_invariant=True, kv_cache_bytes=1 << 26, num_threads=2)
    made = OpenVinoRunner(load_model(smollm2), options)
    yield made
    made.close()


def logits(runner, steps):
    """Runs steps of [(request, first, last)] and returns the logits of request 0 by position."""
    random = np.random.default_rng(3)
    prompts = [random.integers(1000, 40_000, n).tolist() for n in LENGTHS]
    size = runner.block_size
    rows = {}
    for step in steps:
        requests = tuple(
            ScheduledRequest(
                RequestId(str(i)),
                prompts[i][first:last],
                first,
                [4 * i + j for j in range(-(-last // size))],
                last - first,
            )
            for i, first, last in step
        )
        found = runner.execute(SchedulerOutput(requests)).logits
        row = 0
        for i, first, last in step:
            if i == 0:
                rows |= {first + k: found[row + k].copy() for k in range(last - first)}
            row += last - first
    return np.stack([rows[position] for position in range(LENGTHS[0])])


def test_chunks_decodes_and_batch_mates_change_no_bit(runner):
    alone = logits(runner, [[(0, k, k + 1)] for k in range(40)])
    whole = logits(runner, [[(0, 0, 40)]])
    chunked = logits(runner, [[(0, 0, 13)], [(0, 13, 40)]])
    mixed = logits(runner, [[(1, 0, 7), (0, 0, 20), (2, 0, 33)], [(0, 20, 21), (3, 0, 20)], [(3, 0, 1), (0, 21, 40)]])
    for other in (whole, chunked, mixed):
        np.testing.assert_array_equal(alone, other)


def test_without_the_mode_a_decode_differs_from_a_chunk(smollm2):
    """What the mode is for; the day that this fails it is no longer needed."""
    plain = OpenVinoRunner(load_model(smollm2), CpuOptions(exact=True, kv_cache_bytes=1 << 26, num_threads=2))
    try:
        alone = logits(plain, [[(0, k, k + 1)] for k in range(40)])
        assert not np.array_equal(alone, logits(plain, [[(0, 0, 40)]]))
    finally:
        plain.close()


def test_one_by_one_splits_tokens_over_the_same_blocks():
    request = ScheduledRequest(RequestId("a"), [7, 8, 9], 3, [5, 6], 2)
    assert one_by_one([request], 4) == [("a", (7,), 3, [5], 0), ("a", (8,), 4, [5, 6], 1), ("a", (9,), 5, [5, 6], 1)]
