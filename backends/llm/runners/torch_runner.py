"""TorchRunner: the decoder in torch over paged caches: the plain reference on a CPU, kernels and graphs on a GPU."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Literal, get_args

import numpy as np
import torch

from backends.llm.engine.outputs import ModelRunnerOutput, SchedulerOutput
from backends.llm.loaders.base import LoadedModel
from backends.llm.models.config import DecoderConfig
from backends.llm.models.decoder import Decoder
from backends.llm.runners import flashinfer_attention
from backends.llm.runners.decode_graphs import Capture, DecodeGraphs, cuda_capture
from backends.llm.runners.flashinfer_attention import FlashInferAttention
from backends.llm.runners.gpu_memory import kv_cache_bytes_left, step_bytes
from backends.llm.runners.option_values import take_flags, take_integers
from backends.llm.runners.step_attention import KernelAttention, PagedCache, PlainAttention, StepAttention
from backends.llm.runners.step_inputs import flatten
from compiler.errors import EnvironmentLacks, UsageError

Precision = Literal["float32", "bfloat16", "float16"]
Attention = Literal["auto", "plain", "kernel", "flashinfer"]
_CPU_CACHE_BYTES = 1 << 30


@dataclass(frozen=True)
class TorchOptions:
    """How large the cache is, and where and how the model is computed.

    Attributes:
        kv_cache_bytes: memory for keys and values; the number of blocks follows from it. None is 1 GiB on a CPU, and on
            a GPU what `gpu_memory_utilization` leaves.
        gpu_memory_utilization: the share of a GPU's memory that may be taken, by other processes too.
        block_size: tokens in a block; the kernel wants a power of 2 of at least 16.
        device: "cpu", "cuda" or "cuda:N"; "auto" becomes "cuda" where torch sees a GPU, else "cpu".
        dtype: of weights and caches.
        attention: "plain" gathers the blocks of one request after the other and writes every score down; "kernel" reads
            them in place (see paged_attention.py); "flashinfer" is the package's. "auto" is plain on a CPU; on a GPU it
            is FlashInfer's where that is installed and has kernels for the model, else ours.
        cuda_graphs: on a GPU, steps of decodes alone are recorded and replayed, on our kernel (see decode_graphs.py).
    """

    kv_cache_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    block_size: int = 16
    device: str = "cpu"
    dtype: Precision = "float32"
    attention: Attention = "auto"
    cuda_graphs: bool = True

    def __post_init__(self) -> None:
        for name, kinds in (("dtype", Precision), ("attention", Attention)):
            if getattr(self, name) not in get_args(kinds):
                raise UsageError(f"{name} is {getattr(self, name)!r}; allowed: {', '.join(get_args(kinds))}")
        take_flags(self, ("cuda_graphs",))
        whole = {"block_size": (1, "1 and more")}
        if self.kv_cache_bytes is not None:
            whole["kv_cache_bytes"] = (1, "a number of bytes, more than 0")
        take_integers(self, whole)
        share = self.gpu_memory_utilization
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise UsageError(f"gpu_memory_utilization is {share!r}; allowed: above 0, up to 1")
        if self.device == "auto":
            object.__setattr__(self, "device", "cuda" if torch.cuda.is_available() else "cpu")
        if not isinstance(self.device, str) or not re.fullmatch(r"cpu|cuda(:\d+)?", self.device):
            raise UsageError(f"device is {self.device!r}; allowed: auto, cpu, cuda, cuda:N")
        on_gpu = self.device != "cpu"
        wants_kernel = self.attention == "kernel" or (on_gpu and self.attention != "plain")
        if wants_kernel and (self.block_size < 16 or self.block_size & (self.block_size - 1)):
            raise UsageError(f"block_size is {self.block_size}; the kernel wants a power of 2 of at least 16")
        if self.attention == "flashinfer" and not on_gpu:
            raise UsageError("attention is 'flashinfer' and device is 'cpu'; FlashInfer needs an NVIDIA GPU")
        if on_gpu and not torch.cuda.is_available():
            raise EnvironmentLacks(f"device is {self.device!r}, and torch sees no GPU", hint="use device 'cpu'")


def torch_runner(
    model: LoadedModel, options: TorchOptions, *, max_num_batched_tokens: int = 512, max_num_seqs: int = 64
) -> TorchRunner:
    """Returns a runner with as many blocks as the memory holds.

    Args:
        max_num_batched_tokens, max_num_seqs: of the scheduler; what a step takes of a GPU's memory follows from them.

    Raises:
        UsageError: it holds none, or FlashInfer has no kernels for the model.
        EnvironmentLacks: FlashInfer is not installed.
    """
    config = model.config
    dtype: torch.dtype = getattr(torch, options.dtype)
    tokens = config.num_hidden_layers * options.block_size
    block_bytes = 2 * dtype.itemsize * tokens * config.num_key_value_heads * config.head_dim
    attention = choose_attention(
        options, config, has_flashinfer=flashinfer_attention.is_installed(), has_triton=find_spec("triton") is not None
    )
    device, capture, memory = torch.device(options.device), None, options.kv_cache_bytes
    if device.type == "cuda":
        if options.cuda_graphs and attention != "plain":
            capture = cuda_capture(device)
        if memory is None:
            free, total = torch.cuda.mem_get_info(device)
            memory = kv_cache_bytes_left(
                config,
                dtype.itemsize,
                free=free,
                total=total,
                utilization=options.gpu_memory_utilization,
                step=step_bytes(config, dtype.itemsize, max_num_batched_tokens, max_num_seqs),
                workspaces=flashinfer_attention.workspace_bytes(config) if attention == "flashinfer" else 0,
            )
    memory = _CPU_CACHE_BYTES if memory is None else memory
    num_blocks = memory // block_bytes - (capture is not None)  # graphs have one of their own
    if num_blocks < 1:
        raise UsageError(f"kv_cache_bytes is {memory}; one block takes {block_bytes}")
    return TorchRunner(
        model,
        num_blocks=num_blocks,
        block_size=options.block_size,
        device=options.device,
        dtype=dtype,
        attention=attention,
        capture=capture,
    )


def choose_attention(
    options: TorchOptions, config: DecoderConfig, *, has_flashinfer: bool, has_triton: bool
) -> Attention:
    """Returns what "auto" means here, and checks what was asked for; never "auto".

    Raises:
        EnvironmentLacks, UsageError: see `torch_runner`.
    """
    dtype: torch.dtype = getattr(torch, options.dtype)
    suits = flashinfer_attention.suits(config, dtype)
    if options.attention == "flashinfer":
        if not has_flashinfer:
            hint = "pip install flashinfer-python, or use attention 'kernel'"
            raise EnvironmentLacks("attention is 'flashinfer', and that package is not installed", hint=hint)
        if not suits:
            raise UsageError(
                f"attention is 'flashinfer', dtype {options.dtype} and the model's head_dim {config.head_dim}; it has "
                f"kernels for float16 and bfloat16 and {', '.join(map(str, flashinfer_attention.HEAD_DIMS))}"
            )
    if options.attention != "auto":
        return options.attention
    if options.device == "cpu" or not has_triton:
        return "plain"
    return "flashinfer" if has_flashinfer and suits else "kernel"


class TorchRunner:
    """A ModelRunner that is meant to be read and compared with; see `ModelRunner` for the attributes.

    Args:
        attention: not "auto".
        capture: how steps of decodes alone are recorded; None computes them as all others.
    """

    name = "torch"

    def __init__(
        self,
        model: LoadedModel,
        *,
        num_blocks: int,
        block_size: int = 16,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        attention: Attention = "plain",
        capture: Capture | None = None,
    ) -> None:
        self.config = config = model.config
        self.block_size, self.num_blocks = block_size, num_blocks
        self.vocab_size, self.max_model_len = config.vocab_size, config.max_position_embeddings
        self._device = torch.device(device)
        self._decoder = Decoder(model, dtype=dtype, device=device)
        blocks = num_blocks + (capture is not None)
        shape = (config.num_hidden_layers, blocks, block_size, config.num_key_value_heads, config.head_dim)
        cache = PagedCache(*(torch.zeros(shape, dtype=dtype, device=device) for _ in "kv"))
        self.block_bytes = 2 * cache.keys[:, 0].numel() * cache.keys.element_size()
        kinds: dict[Attention, type[PlainAttention | KernelAttention | FlashInferAttention]] = {
            "plain": PlainAttention,
            "kernel": KernelAttention,
            "flashinfer": FlashInferAttention,
        }
        self._attention: StepAttention = kinds[attention](config, cache)
        self._graphs = None
        if capture is not None:
            longest = -(-self.max_model_len // block_size)
            self._graphs = DecodeGraphs(
                self._decoder, config, cache, spare_block=num_blocks, max_blocks=longest, capture=capture
            )

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """See ModelRunner."""
        if not output.requests:
            return ModelRunnerOutput(np.zeros((0, self.vocab_size), dtype=np.float32))
        inputs = flatten(output.requests)
        with torch.inference_mode(), self._on_device():
            if self._graphs is not None and self._graphs.take(inputs):
                logits = self._graphs.run(inputs)
            else:
                arrays = (inputs.input_ids, inputs.position_ids, inputs.logits_indices)
                ids, positions, rows = (torch.from_numpy(array).to(self._device).long() for array in arrays)
                logits = self._decoder(ids, positions, self._attention.prepare(inputs), rows)
            return ModelRunnerOutput(logits.cpu().numpy())

    def _on_device(self) -> AbstractContextManager[None]:
        """Kernels are launched on the current GPU, whatever the tensors say."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()

    def close(self) -> None:
        """Frees weights and cache."""
        del self._decoder, self._attention, self._graphs
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
