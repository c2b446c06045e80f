"""What a GPU's memory leaves for the KV cache. Pure arithmetic; what it counts is an estimate from above."""

from __future__ import annotations

from backends.llm.capacity import num_parameters
from backends.llm.models.config import DecoderConfig
from compiler.errors import UsageError
from compiler.units import shown_bytes

_SLACK = 1.1  # what the allocator leaves unused between tensors


def step_bytes(config: DecoderConfig, width: int, max_tokens: int, max_rows: int) -> int:
    """Returns the memory of the largest step beside weights and cache.

    Alive at the widest place of a layer: residual, normed (and in float32, twice), gate and up, their product; and of
    the rows that get logits, the logits in the model's numbers, in float32 and, where graphs keep theirs, once more for
    each size up to the next power of 2.

    Args:
        width: bytes of a number.
        max_tokens: of a step.
        max_rows: requests that run side by side.
    """
    heads = (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
    layer = config.hidden_size * (2 * width + 8) + max(4 * config.intermediate_size, 3 * heads) * width
    logits = config.vocab_size * (width + 3 * 4)
    return int(_SLACK * (max_tokens * layer + 2 * max_rows * logits))


def kv_cache_bytes_left(
    config: DecoderConfig, width: int, *, free: int, total: int, utilization: float, step: int, workspaces: int
) -> int:
    """Returns what `utilization` of a GPU leaves for the cache, of what is free now.

    Args:
        width: bytes of a number.
        free, total: of the GPU, before the weights are there.
        utilization: the share of its memory that all processes on it may take together.
        step: see `step_bytes`.
        workspaces: of libraries.

    Raises:
        UsageError: nothing is left.
    """
    weights = num_parameters(config) * width
    allowed = free - int(total * (1 - utilization))
    left = allowed - weights - step - workspaces
    if left <= 0:
        raise UsageError(
            f"gpu_memory_utilization is {utilization:g}: of the GPU's {shown_bytes(total)} {shown_bytes(free)} are "
            f"free and {shown_bytes(max(allowed, 0))} may be taken; weights take {shown_bytes(weights)}, a step up to "
            f"{shown_bytes(step + workspaces)}, and nothing is left for the KV cache",
            hint="another dtype, a smaller max_num_batched_tokens or max_num_seqs, or a GPU with more memory",
        )
    return left
