"""OpenVinoRunner: compiles the graph, owns the cache tensors, computes steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import openvino as ov

from backends.llm.engine.outputs import BlockId, ModelRunnerOutput, RequestId, ScheduledRequest, SchedulerOutput
from backends.llm.loaders.base import LoadedModel
from backends.llm.runners.cpu_options import CpuOptions, WeightFormat
from backends.llm.runners.memory import give_back_memory, release_pages, zeroed
from backends.llm.runners.openvino.graph_cache import open_graph
from backends.llm.runners.step_inputs import StepInputs, flatten, one_by_one
from compiler.errors import UsageError

if TYPE_CHECKING:
    import numpy.typing as npt

_STEP_FIELDS = tuple(f.name for f in fields(StepInputs))
# Few rows go through kernels of their own, which round differently: one in all forms, up to four in "u8_rows".
_ALIKE_ROWS = 8
_NO_LOGITS = np.zeros(1, dtype=np.int32)


class OpenVinoRunner:
    """A ModelRunner on OpenVINO's CPU plugin.

    Attributes:
        name: as users call it.
        block_size: tokens in a block; the plugin says it.
        num_blocks: as many as `kv_cache_bytes` holds.
        block_bytes: keys and values of one block in all layers.
        vocab_size, max_model_len: of the model.
        compile_seconds: how long OpenVINO took.
    """

    name = "openvino"

    def __init__(self, model: LoadedModel, options: CpuOptions | None = None) -> None:
        """Builds and compiles the graph; the model's weights are read here and not kept.

        Raises:
            ModelRefused: a model that OpenVINO's paged attention cannot compute.
            UsageError: `kv_cache_bytes` holds no block.
        """
        options = options or CpuOptions()
        self.vocab_size = model.config.vocab_size
        self.max_model_len = model.config.max_position_embeddings
        form: WeightFormat = "stored" if options.exact else options.weights
        graph, folder = open_graph(model, form, options)
        give_back_memory()  # of building the graph
        started = time.monotonic()
        compiled = _compile(graph, options)
        self.compile_seconds = time.monotonic() - started
        del graph
        caches = [port for port in compiled.inputs if "cache" in port.any_name]
        # In u8 some rows of a block of keys hold their scales.
        self.block_size = min(_fixed(port)[1] for port in caches)
        self.block_bytes = sum(_block_bytes(port) for port in caches)
        self._batch_invariant = options.batch_invariant
        num_blocks = options.kv_cache_bytes // self.block_bytes
        self.num_blocks = num_blocks - options.batch_invariant  # the last one is for a row that nobody sees
        if self.num_blocks < 1:
            raise UsageError(f"kv_cache_bytes is {options.kv_cache_bytes}; one block takes {self.block_bytes}")
        self._request = compiled.create_infer_request()
        self._cache = [zeroed(num_blocks * _block_bytes(port)) for port in caches]  # OpenVINO only borrows it
        for port, memory in zip(caches, self._cache, strict=True):
            self._request.set_tensor(port, _as_tensor(memory, port, num_blocks))
        self._ports = [(name, compiled.input(name)) for name in _STEP_FIELDS]
        self._compiled = compiled
        self._pack(folder)

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """See ModelRunner. The logits are the graph's own output memory, which the next call overwrites."""
        if not output.requests:
            return ModelRunnerOutput(np.zeros((0, self.vocab_size), dtype=np.float32))
        requests: Sequence[ScheduledRequest] = output.requests
        if self._batch_invariant:
            requests = one_by_one(requests, self.block_size)
            nobody = ScheduledRequest(RequestId(""), (0,), 0, (BlockId(self.num_blocks),), 0)
            requests += [nobody] * (_ALIKE_ROWS - len(requests))
        inputs = flatten(requests)
        num_logits = len(inputs.logits_indices)
        for name, port in self._ports:
            array = getattr(inputs, name)
            if name == "logits_indices":
                array = self._rows(array)
            self._request.set_tensor(port, ov.Tensor(array))
        self._request.infer()
        logits: npt.NDArray[np.float32] = self._request.get_output_tensor(0).data
        return ModelRunnerOutput(logits[:num_logits])

    def _pack(self, mapped: Path | None) -> None:
        """Computes a token, which makes the plugin pack the weights, and gives back what they were packed from.

        So the first request does not wait for it. What was written for block 0 is read by nobody.
        """
        self.execute(SchedulerOutput((ScheduledRequest(RequestId(""), (0,), 0, (BlockId(0),), 1),)))
        if mapped is not None:
            release_pages(mapped)
        give_back_memory()

    def _rows(self, indices: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """Returns the rows that get logits: the graph wants one, and more of them to be batch-invariant."""
        if not len(indices):
            return _NO_LOGITS
        missing = _ALIKE_ROWS - len(indices) if self._batch_invariant else 0
        return np.concatenate([indices, np.repeat(indices[:1], missing)]) if missing > 0 else indices

    def close(self) -> None:
        """Frees weights and cache."""
        del self._request, self._compiled, self._ports, self._cache


def _compile(graph: ov.Model, options: CpuOptions) -> ov.CompiledModel:
    core = ov.Core()
    settings: dict[str, object] = {"PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": 1}
    if options.num_threads:
        settings["INFERENCE_NUM_THREADS"] = options.num_threads
    if options.exact:
        settings |= {
            "INFERENCE_PRECISION_HINT": "f32",
            "KV_CACHE_PRECISION": "f32",
            "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
        }
    else:
        compute = "bf16" if "BF16" in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES") else "f32"
        settings["INFERENCE_PRECISION_HINT"] = compute
        if options.weights == "u8_rows":
            # Activations as bytes, with a scale for so many of them: 32, the default, is up to a fifth slower.
            settings["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = 64
        settings["KV_CACHE_PRECISION"] = compute if options.kv_cache_precision == "auto" else "u8"
    return core.compile_model(graph, "CPU", settings)


def _fixed(port: ov.Output) -> list[int]:
    """Returns [kv_heads, block_size, width] of a cache input; the first dim, the blocks, is ours to choose."""
    return [dim.get_length() for dim in list(port.partial_shape)[1:]]


def _block_bytes(port: ov.Output) -> int:
    return int(np.prod(_fixed(port))) * int(port.element_type.size)


def _as_tensor(memory: npt.NDArray[np.uint8], port: ov.Output, num_blocks: int) -> ov.Tensor:
    kind = port.element_type
    return ov.Tensor(memory.view(f"u{kind.size}"), ov.Shape([num_blocks, *_fixed(port)]), kind)
