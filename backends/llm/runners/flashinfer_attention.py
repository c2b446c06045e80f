"""Attention by FlashInfer (https://flashinfer.ai), where it is installed: its paged prefill kernels, for all steps.

A decode is a prefill of one token there, so chunks and decodes mix in one call. The blocks are read in place: our
layers are its "NHD" layout. A plan is made for each step, one for layers with a window and one for those without.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from backends.llm.models.config import DecoderConfig
from backends.llm.models.decoder import Attend, is_windowed
from backends.llm.runners.step_attention import PagedCache, Slots, block_tables
from backends.llm.runners.step_inputs import StepInputs

HEAD_DIMS = (64, 128, 256)
DTYPES = (torch.float16, torch.bfloat16)
_WORKSPACE_BYTES = 128 << 20  # what its documentation recommends


def is_installed() -> bool:
    return find_spec("flashinfer") is not None


def suits(config: DecoderConfig, dtype: torch.dtype) -> bool:
    """Whether its kernels are made for such heads and numbers."""
    return config.head_dim in HEAD_DIMS and dtype in DTYPES


def workspace_bytes(config: DecoderConfig) -> int:
    """Returns what its wrappers take: one for each kind of layer that the model has."""
    kinds = {is_windowed(config, layer) for layer in range(config.num_hidden_layers)}
    return len(kinds) * _WORKSPACE_BYTES


def new_wrapper(device: torch.device) -> Any:
    """Returns one of its wrappers with a workspace of its own."""
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    return BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")


@dataclass(frozen=True)
class FlashInferAttention:
    """See StepAttention.

    Args:
        make_wrapper: `new_wrapper`.
    """

    config: DecoderConfig
    cache: PagedCache
    make_wrapper: Callable[[torch.device], Any] = new_wrapper
    _wrappers: dict[bool, Any] = field(default_factory=dict)  # by whether its layers have a window

    def prepare(self, inputs: StepInputs) -> Attend:
        """See StepAttention."""
        config, cache = self.config, self.cache
        slots, pages = Slots.of(inputs, cache), Pages.of(inputs, cache.block_size)
        windowed = [is_windowed(config, layer) for layer in range(config.num_hidden_layers)]
        wrappers = {window: self._planned(window, inputs, pages) for window in sorted(set(windowed))}

        def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            slots.store(cache, layer, key, value)
            attended: Tensor = wrappers[windowed[layer]].run(
                query.contiguous(), (cache.keys[layer], cache.values[layer])
            )
            return attended

        return attend

    def _planned(self, window: bool, inputs: StepInputs, pages: Pages) -> Any:
        config = self.config
        if window not in self._wrappers:
            self._wrappers[window] = self.make_wrapper(self.cache.keys.device)
        wrapper = self._wrappers[window]
        wrapper.plan(
            torch.from_numpy(inputs.subsequence_begins),
            torch.from_numpy(pages.begins),
            torch.from_numpy(pages.indices).to(self.cache.keys.device),
            torch.from_numpy(pages.last_lens),
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            self.cache.block_size,
            causal=True,
            sm_scale=config.query_scale,
            # It counts the tokens to the left; ours counts the token itself too.
            window_left=config.sliding_window - 1 if window and config.sliding_window is not None else -1,
            logits_soft_cap=config.attention_softcap,
            q_data_type=self.cache.keys.dtype,
            kv_data_type=self.cache.keys.dtype,
        )
        return wrapper


@dataclass(frozen=True)
class Pages:
    """The block tables in FlashInfer's form, in which the length of a request follows from its pages.

    Attributes:
        begins: [num_requests + 1] int32, where each request's pages start in `indices`.
        indices: [sum of pages] int32.
        last_lens: [num_requests] int32, tokens in the last page of each, 1 .. block_size.
    """

    begins: np.ndarray[Any, np.dtype[np.int32]]
    indices: np.ndarray[Any, np.dtype[np.int32]]
    last_lens: np.ndarray[Any, np.dtype[np.int32]]

    @classmethod
    def of(cls, inputs: StepInputs, block_size: int) -> Pages:
        """Leaves out blocks that a request has and does not use yet."""
        lengths = inputs.past_lens + np.diff(inputs.subsequence_begins)
        counts = -(-lengths // block_size)
        used = [table[:count] for table, count in zip(block_tables(inputs), counts.tolist(), strict=True)]
        return cls(
            begins=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
            indices=np.concatenate(used).astype(np.int32),
            last_lens=(lengths - (counts - 1) * block_size).astype(np.int32),
        )
