"""The interface of a model runner; `numba`, `openvino` and `torch` implement it."""

from __future__ import annotations

from typing import Protocol

from backends.llm.engine.outputs import ModelRunnerOutput, SchedulerOutput


class ModelRunner(Protocol):
    """Computes steps over a KV cache of blocks that it owns; which block belongs to whom is the scheduler's affair.

    Attributes:
        name: as users call it.
        block_size: tokens in one block.
        block_bytes: memory of one block, in all layers.
        num_blocks: blocks in the cache, ids 0 .. num_blocks - 1.
        vocab_size: width of the logits.
        max_model_len: positions that the model was made for, in tokens.
    """

    @property
    def name(self) -> str: ...

    @property
    def block_size(self) -> int: ...

    @property
    def block_bytes(self) -> int: ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_model_len(self) -> int: ...

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Writes the keys and values of the scheduled tokens into their blocks and returns the logits asked for."""
        ...

    def close(self) -> None:
        """Frees weights and cache."""
        ...
