"""NumbaRunner: packs the weights, owns the cache and the threads, computes steps."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from backends.llm.engine.outputs import BlockId, ModelRunnerOutput, RequestId, ScheduledRequest, SchedulerOutput
from backends.llm.loaders.base import LoadedModel
from backends.llm.models.rope import Rotation, rotation
from backends.llm.runners.cores import available_cores
from backends.llm.runners.cpu_options import CpuOptions
from backends.llm.runners.memory import zeroed
from backends.llm.runners.numba.attention import BLOCK
from backends.llm.runners.numba.packed_file import open_packed
from backends.llm.runners.numba.packing import packed_bytes
from backends.llm.runners.numba.step_attention import (
    KEYS,
    LAYER_BYTES,
    LOGITS,
    LOGITS_AT,
    ROWS,
    THREADS,
    VALUES,
    plan_attention,
)
from backends.llm.runners.numba.team import Team
from backends.llm.runners.numba.work import MAX_PARTS, MAX_ROWS, model_of, shape_of, step_of
from backends.llm.runners.step_inputs import flatten
from compiler.errors import UsageError

if TYPE_CHECKING:
    import numpy.typing as npt


_BYTES_OF_A_THREAD = 8 << 20  # of weights, at least; a guess for machines of many cores, none was at hand
_KEPT_LOGITS = 64  # rows; the log probabilities of a prompt need many more for a step


class NumbaRunner:
    """A ModelRunner on kernels of our own, for what `numba_lacks` says nothing against.

    The same tokens give the same logits, to the bit, alone or in a batch, in chunks or whole.

    Attributes:
        name: as users call it.
        block_size: tokens in a block.
        num_blocks: as many as `kv_cache_bytes` holds.
        block_bytes: keys and values of one block in all layers.
        vocab_size, max_model_len: of the model.
        compile_seconds: how long the kernels took to become machine code, or to be read from where that is kept.
    """

    name = "numba"

    def __init__(self, model: LoadedModel, options: CpuOptions | None = None) -> None:
        """Packs the weights, or maps those that are packed already.

        Raises:
            UsageError: `kv_cache_bytes` holds no block.
        """
        options = options or CpuOptions()
        config = model.config
        self.vocab_size = config.vocab_size
        self.max_model_len = config.max_position_embeddings
        self.block_size = BLOCK
        block = 2 * BLOCK * config.num_key_value_heads * config.head_dim  # bytes of keys, in one layer
        self.block_bytes = 2 * block * config.num_hidden_layers
        self.num_blocks = options.kv_cache_bytes // self.block_bytes
        if self.num_blocks < 1:
            raise UsageError(f"kv_cache_bytes is {options.kv_cache_bytes}; one block takes {self.block_bytes}")
        self._softcap = config.logits_softcap
        self._packed = open_packed(model, options)
        shape, self._model = shape_of(config), model_of(config, self._packed)
        self._shape = shape
        kinds = (False, True) if self._model.windows.any() else (False,)
        self._rotations = [rotation(config, windowed=windowed) for windowed in kinds]
        num_threads = options.num_threads or _threads_for(packed_bytes(config))
        self._step = step_of(shape, self._model, -(-self.max_model_len // BLOCK), num_threads)
        layer_bytes = self.num_blocks * block
        self._cache = [zeroed(layer_bytes * shape.layers) for _ in range(2)]
        self._width = int(self._model.matrices[-2, 2])
        self._logits = self._rows_of_logits(1)
        counts = self._step.counts
        counts[KEYS], counts[VALUES] = (memory.ctypes.data for memory in self._cache)
        counts[LAYER_BYTES], counts[THREADS] = layer_bytes, num_threads
        started = time.monotonic()
        self._team = Team(shape, self._model, self._step, num_threads)
        self.compile_seconds = time.monotonic() - started
        self._warm_up()

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """See ModelRunner. The logits are memory of the runner's own, which the next call overwrites."""
        num_logits = sum(request.num_logits for request in output.requests)
        if not num_logits <= len(self._logits) <= max(_KEPT_LOGITS, 4 * num_logits):
            self._logits = self._rows_of_logits(max(1, num_logits))
        done = 0
        for requests in _parts(output.requests):
            done += self._compute(requests, done)
        logits = self._logits[:num_logits, : self.vocab_size]
        if self._softcap is not None:
            np.multiply(np.tanh(logits / np.float32(self._softcap)), np.float32(self._softcap), out=logits)
        return ModelRunnerOutput(logits)

    def close(self) -> None:
        """Ends the threads, frees weights and cache."""
        self._team.close()
        del self._team, self._step, self._model, self._packed, self._cache, self._logits

    def _rows_of_logits(self, number: int) -> npt.NDArray[np.float32]:
        return zeroed(4 * number * self._width).view(np.float32).reshape(number, self._width)

    def _warm_up(self) -> None:
        """Computes a token, so that the first request finds all compiled and in memory; block 0 is nobody's yet."""
        self.execute(SchedulerOutput((ScheduledRequest(RequestId(""), (0,), 0, (BlockId(0),), 1),)))

    def _compute(self, requests: Sequence[ScheduledRequest], first_logits: int) -> int:
        """Computes MAX_ROWS tokens at most; returns how many rows of logits they gave."""
        inputs, step = flatten(requests), self._step
        rows, logits = len(inputs.input_ids), len(inputs.logits_indices)
        self._team.begin()
        step.ids[:rows], step.positions[:rows] = inputs.input_ids, inputs.position_ids
        step.begins[: len(requests) + 1] = inputs.subsequence_begins
        step.tables[: len(inputs.block_indices)] = inputs.block_indices
        step.table_begins[: len(requests) + 1] = inputs.block_indices_begins
        step.logits_rows[:logits] = inputs.logits_indices
        for which, turn in enumerate(self._rotations):
            self._angles(which, turn, rows)
        step.counts[ROWS], step.counts[LOGITS] = rows, logits
        step.counts[LOGITS_AT] = self._logits[first_logits:].ctypes.data
        plan_attention(self._shape, step, len(requests), MAX_PARTS)
        self._team.compute()
        return logits

    def _angles(self, which: int, turn: Rotation, rows: int) -> None:
        angles = self._step.positions[:rows, None].astype(np.float32) * turn.frequencies
        magnitude = np.float32(turn.magnitude)
        np.multiply(np.cos(angles), magnitude, out=self._step.cos[which, :rows])
        np.multiply(np.sin(angles), magnitude, out=self._step.sin[which, :rows])


def _threads_for(weight_bytes: int) -> int:
    """Returns how many threads compute where nobody says: with less work in a phase they would wait for each other."""
    return min(available_cores(), max(1, weight_bytes // _BYTES_OF_A_THREAD))


def _parts(requests: Sequence[ScheduledRequest]) -> Iterator[list[ScheduledRequest]]:
    """Divides a step into some of MAX_ROWS tokens at most; a prompt's tokens stay in their order."""
    part: list[ScheduledRequest] = []
    room = MAX_ROWS
    for request_id, token_ids, computed, block_ids, num_logits in requests:
        done = 0
        while done < len(token_ids):
            some = token_ids[done : done + room]
            rest = len(token_ids) - done - len(some)
            wanted = min(len(some), max(0, num_logits - rest))
            part.append(ScheduledRequest(request_id, some, computed + done, block_ids, wanted))
            done += len(some)
            room -= len(some)
            if not room:
                yield part
                part, room = [], MAX_ROWS
    if part:
        yield part
