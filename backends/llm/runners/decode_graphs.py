"""DecodeGraphs: steps in which every request gets one token, recorded as CUDA graphs and replayed.

A decode of a small model is hundreds of short kernels, and launching them from Python takes longer than they do. A
graph launches all of them at once, over the same memory each time: so a step's numbers are copied into buffers of a
size that was recorded (1, 2, 4, ... rows), and the rows that are left over decode a token that nobody sees, in a block
of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from backends.llm.models.config import DecoderConfig
from backends.llm.models.decoder import Decoder
from backends.llm.runners.step_attention import PagedCache, Slots, block_tables, heads_per_kv_head, kernel_attend
from backends.llm.runners.step_inputs import StepInputs
from backends.llm.runners.tiles import Tiles

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)

Step = Callable[[], Tensor]
# Takes a step and returns what repeats it, and the memory in which its logits are then.
Capture = Callable[[Step], tuple[Callable[[], None], Tensor]]


def cuda_capture(device: torch.device) -> Capture:
    """Returns what records steps on a GPU, all of them in one pool of memory: only one is under way at a time."""
    pool: Any = torch.cuda.graph_pool_handle()

    def capture(step: Step) -> tuple[Callable[[], None], Tensor]:
        # Once without recording, on a stream of its own as torch wants it: kernels are compiled and libraries make
        # their workspaces, neither of which may happen while a graph is recorded.
        current, beside = torch.cuda.current_stream(device), torch.cuda.Stream(device)
        beside.wait_stream(current)
        with torch.cuda.stream(beside):
            step()
        current.wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            logits = step()
        return graph.replay, logits

    return capture


@dataclass(frozen=True)
class _Recorded:
    """One graph and the buffers that it reads.

    Attributes:
        input_ids, position_ids: [rows] int64.
        slots: [rows] each.
        tables: [rows, max_blocks] int32.
        past_lens: [rows] int32.
        replay: computes them.
        logits: [rows, vocab_size], where the result is then.
    """

    input_ids: Tensor
    position_ids: Tensor
    slots: Slots
    tables: Tensor
    past_lens: Tensor
    replay: Callable[[], None]
    logits: Tensor


class DecodeGraphs:
    """Graphs by their number of rows, each recorded when it is first needed.

    Args:
        spare_block: the block of rows that are left over; no request has it.
        max_blocks: blocks of the longest request there can be.
        capture: `cuda_capture`.
    """

    def __init__(
        self,
        decoder: Decoder,
        config: DecoderConfig,
        cache: PagedCache,
        *,
        spare_block: int,
        max_blocks: int,
        capture: Capture,
    ) -> None:
        self._decoder, self._config, self._cache = decoder, config, cache
        self._spare_block, self._max_blocks, self._capture = spare_block, max_blocks, capture
        self._recorded: dict[int, _Recorded] = {}

    def take(self, inputs: StepInputs) -> bool:
        """Returns whether a step is one for a graph: a token and its logits for each request, and not too many."""
        count = len(inputs.past_lens)
        return len(inputs.input_ids) == len(inputs.logits_indices) == count <= SIZES[-1]

    def run(self, inputs: StepInputs) -> Tensor:
        """Computes a step.

        Returns:
            [num_requests, vocab_size] float32, which the next call overwrites.
        """
        count = len(inputs.past_lens)
        size = next(size for size in SIZES if size >= count)
        recorded = self._recorded.get(size)
        if recorded is None:
            recorded = self._recorded[size] = self._record(size)
        slots = Slots.of(inputs, self._cache)
        tables = block_tables(inputs)
        padded = np.full((size, max(map(len, tables))), self._spare_block, dtype=np.int32)
        for row, table in zip(padded, tables, strict=False):
            row[: len(table)] = table
        recorded.tables[:, : padded.shape[1]].copy_(torch.from_numpy(padded))
        self._fill(recorded.input_ids, torch.from_numpy(inputs.input_ids), 0)
        self._fill(recorded.position_ids, torch.from_numpy(inputs.position_ids), 0)
        self._fill(recorded.past_lens, torch.from_numpy(inputs.past_lens), 0)
        self._fill(recorded.slots.blocks, slots.blocks, self._spare_block)
        self._fill(recorded.slots.offsets, slots.offsets, 0)
        recorded.replay()
        return recorded.logits[:count]

    def _fill(self, buffer: Tensor, values: Tensor, rest: int) -> None:
        buffer[: len(values)].copy_(values)
        buffer[len(values) :].fill_(rest)

    def _record(self, size: int) -> _Recorded:
        device = self._cache.keys.device
        input_ids, position_ids, offsets = (torch.zeros(size, dtype=torch.int64, device=device) for _ in range(3))
        slots = Slots(torch.full_like(offsets, self._spare_block), offsets)
        tables = torch.full((size, self._max_blocks), self._spare_block, dtype=torch.int32, device=device)
        past_lens = torch.zeros(size, dtype=torch.int32, device=device)
        rows = torch.arange(size, device=device)
        tiles = Tiles.of(torch.arange(size + 1, dtype=torch.int32), heads_per_kv_head(self._config), device)
        attend = kernel_attend(self._config, self._cache, slots, tables, past_lens, tiles)
        replay, logits = self._capture(lambda: self._decoder(input_ids, position_ids, attend, rows))
        return _Recorded(input_ids, position_ids, slots, tables, past_lens, replay, logits)
