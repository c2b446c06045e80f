"""TorchRunner: the plain reference on any device. Blocks are gathered, one request after the other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from backends.llm.engine.outputs import ModelRunnerOutput, SchedulerOutput
from backends.llm.loaders.base import LoadedModel
from backends.llm.models.attention import plain_attention
from backends.llm.models.decoder import Decoder
from backends.llm.runners.step_inputs import StepInputs, flatten
from compiler.errors import UsageError


@dataclass(frozen=True)
class TorchOptions:
    """How large the cache is.

    Attributes:
        kv_cache_bytes: memory for keys and values in float32; the number of blocks follows from it.
    """

    kv_cache_bytes: int = 1 << 28
    block_size: int = 16


def torch_runner(model: LoadedModel, options: TorchOptions) -> TorchRunner:
    """Returns a runner with as many blocks as the memory holds.

    Raises:
        UsageError: it holds none.
    """
    config = model.config
    block_bytes = 2 * 4 * config.num_hidden_layers * options.block_size * config.num_key_value_heads * config.head_dim
    if options.kv_cache_bytes < block_bytes:
        raise UsageError(f"kv_cache_bytes is {options.kv_cache_bytes}; one block takes {block_bytes}")
    return TorchRunner(model, num_blocks=options.kv_cache_bytes // block_bytes, block_size=options.block_size)


class TorchRunner:
    """A ModelRunner that is meant to be read and compared with; see `ModelRunner` for the attributes."""

    def __init__(self, model: LoadedModel, *, num_blocks: int, block_size: int = 16) -> None:
        self.config = config = model.config
        self.block_size, self.num_blocks = block_size, num_blocks
        self.vocab_size, self.max_model_len = config.vocab_size, config.max_position_embeddings
        self._decoder = Decoder(model)
        shape = (config.num_hidden_layers, num_blocks, block_size, config.num_key_value_heads, config.head_dim)
        self._keys, self._values = torch.zeros(shape), torch.zeros(shape)
        self.block_bytes = 2 * self._keys[:, 0].numel() * self._keys.element_size()

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """See ModelRunner."""
        if not output.requests:
            return ModelRunnerOutput(np.zeros((0, self.vocab_size), dtype=np.float32))
        inputs = flatten(output.requests)
        ids, positions, rows = (
            torch.from_numpy(a).long() for a in (inputs.input_ids, inputs.position_ids, inputs.logits_indices)
        )
        with torch.inference_mode():
            logits = self._decoder(ids, positions, _PagedAttention(self, inputs), rows)
        return ModelRunnerOutput(logits.numpy())

    def close(self) -> None:
        """Frees weights and cache."""
        del self._decoder, self._keys, self._values


class _PagedAttention:
    """One step's attention over the block tables."""

    def __init__(self, runner: TorchRunner, inputs: StepInputs) -> None:
        self._runner = runner
        self._tables = [
            torch.from_numpy(t).long() for t in np.split(inputs.block_indices, inputs.block_indices_begins[1:-1])
        ]
        self._begins, self._past = inputs.subsequence_begins.tolist(), inputs.past_lens.tolist()

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        runner = self._runner
        keys, values = runner._keys[layer], runner._values[layer]
        attended = []
        for i, (table, past) in enumerate(zip(self._tables, self._past, strict=True)):
            chunk = slice(self._begins[i], self._begins[i + 1])
            positions = torch.arange(past, past + chunk.stop - chunk.start)
            blocks, offsets = table[positions // runner.block_size], positions % runner.block_size
            keys[blocks, offsets], values[blocks, offsets] = key[chunk], value[chunk]
            total = past + len(positions)
            seen_keys, seen_values = (cache[table].flatten(0, 1)[:total] for cache in (keys, values))
            attended.append(plain_attention(runner.config, layer, query[chunk], seen_keys, seen_values, past))
        return torch.cat(attended)
