"""TorchRunner: the decoder in torch over paged caches: on a CPU the plain reference, on a GPU with our kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from backends.llm.engine.outputs import ModelRunnerOutput, SchedulerOutput
from backends.llm.loaders.base import LoadedModel
from backends.llm.models.attention import plain_attention
from backends.llm.models.decoder import Decoder, is_windowed
from backends.llm.runners.step_inputs import StepInputs, flatten
from compiler.errors import EnvironmentLacks, UsageError

Precision = Literal["float32", "bfloat16", "float16"]
Attention = Literal["plain", "kernel"]


@dataclass(frozen=True)
class TorchOptions:
    """How large the cache is, and where and how the model is computed.

    Attributes:
        kv_cache_bytes: memory for keys and values; the number of blocks follows from it.
        block_size: tokens in a block; the kernel wants a power of 2 of at least 16.
        device: "cpu", "cuda" or "cuda:N".
        dtype: of weights and caches.
        attention: "plain" gathers the blocks of one request after the other and writes every score down; "kernel" reads
            them in place (see paged_attention.py).
    """

    kv_cache_bytes: int = 1 << 28
    block_size: int = 16
    device: str = "cpu"
    dtype: Precision = "float32"
    attention: Attention = "plain"

    def __post_init__(self) -> None:
        for name, kinds in (("dtype", Precision), ("attention", Attention)):
            if getattr(self, name) not in get_args(kinds):
                raise UsageError(f"{name} is {getattr(self, name)!r}; allowed: {', '.join(get_args(kinds))}")
        if self.attention == "kernel" and (self.block_size < 16 or self.block_size & (self.block_size - 1)):
            raise UsageError(f"block_size is {self.block_size}; the kernel wants a power of 2 of at least 16")
        if self.device.partition(":")[0] not in ("cpu", "cuda"):
            raise UsageError(f"device is {self.device!r}; allowed: cpu, cuda, cuda:N")
        if self.device != "cpu" and not torch.cuda.is_available():
            raise EnvironmentLacks(f"device is {self.device!r}, and torch sees no GPU", hint="use device 'cpu'")


def torch_runner(model: LoadedModel, options: TorchOptions) -> TorchRunner:
    """Returns a runner with as many blocks as the memory holds.

    Raises:
        UsageError: it holds none.
    """
    config = model.config
    width = getattr(torch, options.dtype).itemsize
    tokens = config.num_hidden_layers * options.block_size
    block_bytes = 2 * width * tokens * config.num_key_value_heads * config.head_dim
    if options.kv_cache_bytes < block_bytes:
        raise UsageError(f"kv_cache_bytes is {options.kv_cache_bytes}; one block takes {block_bytes}")
    return TorchRunner(
        model,
        num_blocks=options.kv_cache_bytes // block_bytes,
        block_size=options.block_size,
        device=options.device,
        dtype=getattr(torch, options.dtype),
        attention=options.attention,
    )


class TorchRunner:
    """A ModelRunner that is meant to be read and compared with; see `ModelRunner` for the attributes."""

    def __init__(
        self,
        model: LoadedModel,
        *,
        num_blocks: int,
        block_size: int = 16,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        attention: Attention = "plain",
    ) -> None:
        self.config = config = model.config
        self.block_size, self.num_blocks = block_size, num_blocks
        self.vocab_size, self.max_model_len = config.vocab_size, config.max_position_embeddings
        self._decoder = Decoder(model, dtype=dtype, device=device)
        self._device, self._attention = device, attention
        shape = (config.num_hidden_layers, num_blocks, block_size, config.num_key_value_heads, config.head_dim)
        self.keys, self.values = (torch.zeros(shape, dtype=dtype, device=device) for _ in "kv")
        self.block_bytes = 2 * self.keys[:, 0].numel() * self.keys.element_size()

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """See ModelRunner."""
        if not output.requests:
            return ModelRunnerOutput(np.zeros((0, self.vocab_size), dtype=np.float32))
        inputs = flatten(output.requests)
        ids, positions, rows = (
            torch.from_numpy(a).to(self._device).long()
            for a in (inputs.input_ids, inputs.position_ids, inputs.logits_indices)
        )
        attend = (_PlainAttention if self._attention == "plain" else _KernelAttention)(self, inputs)
        with torch.inference_mode():
            logits = self._decoder(ids, positions, attend, rows)
        return ModelRunnerOutput(logits.cpu().numpy())

    def close(self) -> None:
        """Frees weights and cache."""
        del self._decoder, self.keys, self.values


class _PagedAttention:
    """One step's attention over the block tables: new keys and values go to their slots, then tokens attend."""

    def __init__(self, runner: TorchRunner, inputs: StepInputs) -> None:
        self._runner, self._inputs = runner, inputs
        self._tables = np.split(inputs.block_indices, inputs.block_indices_begins[1:-1])
        counts = np.diff(inputs.subsequence_begins)
        request = np.repeat(np.arange(len(counts)), counts)
        place = inputs.block_indices_begins[request] + inputs.position_ids // runner.block_size
        device = runner.keys.device
        self._blocks = torch.from_numpy(inputs.block_indices[place]).to(device).long()
        self._offsets = torch.from_numpy(inputs.position_ids % runner.block_size).to(device).long()

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        runner = self._runner
        runner.keys[layer][self._blocks, self._offsets] = key
        runner.values[layer][self._blocks, self._offsets] = value
        return self._attend(layer, query, runner.keys[layer], runner.values[layer])

    def _attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        raise NotImplementedError


class _PlainAttention(_PagedAttention):
    """Gathers what each request sees."""

    def _attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        begins, attended = self._inputs.subsequence_begins.tolist(), []
        for i, (table, past) in enumerate(zip(self._tables, self._inputs.past_lens.tolist(), strict=True)):
            chunk = query[begins[i] : begins[i + 1]]
            blocks = torch.from_numpy(table).to(keys.device).long()
            seen_keys, seen_values = (cache[blocks].flatten(0, 1)[: past + len(chunk)] for cache in (keys, values))
            attended.append(plain_attention(self._runner.config, layer, chunk, seen_keys, seen_values, past))
        return torch.cat(attended)


class _KernelAttention(_PagedAttention):
    """Hands the tables to the kernel."""

    def __init__(self, runner: TorchRunner, inputs: StepInputs) -> None:
        super().__init__(runner, inputs)
        padded = np.zeros((len(self._tables), max(map(len, self._tables))), dtype=np.int32)
        for row, table in zip(padded, self._tables, strict=True):
            row[: len(table)] = table
        self._padded = torch.from_numpy(padded).to(runner.keys.device)
        self._past = torch.from_numpy(inputs.past_lens).to(runner.keys.device)

    def _attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        from backends.llm.runners.paged_attention import paged_attention

        config = self._runner.config
        return paged_attention(
            query.contiguous(),
            keys,
            values,
            self._padded,
            torch.from_numpy(self._inputs.subsequence_begins),
            self._past,
            scale=config.query_scale,
            softcap=config.attention_softcap,
            sliding_window=config.sliding_window if is_windowed(config, layer) else None,
        )
