"""Attention over a paged KV cache in Triton's language, for GPUs: prefill chunks and decodes in one launch.

A program computes one tile: a few query tokens of one request, for all query heads that share one key-value head. It
walks the request's block table, reads each block in place, and keeps a running softmax (Milakov and Gimelshein,
"Online normalizer calculation for softmax", 2018; Dao, "FlashAttention-2", 2023):

    tile = BLOCK_Q tokens x GROUP heads = BLOCK_M rows
    for each block that a row of the tile sees:
        scores   = scale * q @ k.T                       [BLOCK_M, BLOCK_SIZE]
        new_max  = max(old_max, max(scores))
        acc, sum = both rescaled by exp(old_max - new_max), plus the block's part
    out = acc / sum

Without a GPU the same code runs in Triton's interpreter (TRITON_INTERPRET=1), which is how it is tested there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from backends.llm.runners.tiles import MIN_ROWS, Tiles


@triton.jit  # type: ignore[untyped-decorator]
def _paged_attention_kernel(  # type: ignore[no-untyped-def]
    out_pointer,  # [num_tokens, num_heads, head_dim]
    query_pointer,  # [num_tokens, num_heads, head_dim]
    key_pointer,  # [num_blocks, block_size, num_kv_heads, head_dim]
    value_pointer,  # [num_blocks, block_size, num_kv_heads, head_dim]
    table_pointer,  # [num_requests, max_blocks] int32
    tile_request_pointer,  # [num_tiles] int32
    tile_first_pointer,  # [num_tiles] int32: the tile's first token, counted from its request's first
    query_begin_pointer,  # [num_requests + 1] int32
    past_len_pointer,  # [num_requests] int32
    scale,
    softcap,
    window,
    query_token_stride,
    query_head_stride,
    block_stride,
    slot_stride,
    kv_head_stride,
    table_stride,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    request = tl.load(tile_request_pointer + tile)
    first = tl.load(tile_first_pointer + tile)
    begin = tl.load(query_begin_pointer + request)
    num_new = tl.load(query_begin_pointer + request + 1) - begin
    past = tl.load(past_len_pointer + request)

    rows = tl.arange(0, BLOCK_M)
    tokens = first + rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    row_mask = (rows < BLOCK_Q * GROUP) & (tokens < num_new)
    positions = past + tokens
    dims = tl.arange(0, PADDED_HEAD_DIM)
    dim_mask = dims < HEAD_DIM
    offsets = (begin + tokens)[:, None] * query_token_stride + heads[:, None] * query_head_stride + dims[None, :]
    query = tl.load(query_pointer + offsets, mask=row_mask[:, None] & dim_mask[None, :], other=0.0)

    largest = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)
    acc = tl.zeros([BLOCK_M, PADDED_HEAD_DIM], dtype=tl.float32)
    slots = tl.arange(0, BLOCK_SIZE)
    end = past + tl.minimum(first + BLOCK_Q, num_new)
    start = 0
    if HAS_WINDOW:
        start = tl.maximum(0, past + first - window + 1)
    for block in range(start // BLOCK_SIZE, tl.cdiv(end, BLOCK_SIZE)):
        # 64 bits: a large cache has more than 2 ** 31 elements.
        block_id = tl.load(table_pointer + request * table_stride + block).to(tl.int64)
        base = block_id * block_stride + kv_head * kv_head_stride
        key_positions = block * BLOCK_SIZE + slots
        cached = base + slots[:, None] * slot_stride + dims[None, :]
        # Slots past the end hold what another request left there: 0 times NaN would still be NaN.
        slot_mask = (key_positions < end)[:, None] & dim_mask[None, :]
        key = tl.load(key_pointer + cached, mask=slot_mask, other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        if HAS_SOFTCAP:
            # tanh(x) = 1 - 2 / (exp(2x) + 1), which neither overflows to NaN nor needs a library
            scores = softcap * (1.0 - 2.0 / (tl.exp(2.0 * scores / softcap) + 1.0))
        seen = key_positions[None, :] <= positions[:, None]
        if HAS_WINDOW:
            seen = seen & (key_positions[None, :] > positions[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, axis=1))
        # A row that has seen nothing yet has -inf for both: exp(-inf - -inf) would be NaN.
        shift = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weights = tl.exp(scores - shift[:, None])
        rescale = tl.exp(largest - shift)
        total = total * rescale + tl.sum(weights, axis=1)
        value = tl.load(value_pointer + cached, mask=slot_mask, other=0.0)
        acc = acc * rescale[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        largest = new_largest
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out_pointer + offsets, result.to(out_pointer.dtype.element_ty), mask=row_mask[:, None] & dim_mask[None, :])


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    past_lens: torch.Tensor,
    tiles: Tiles,
    *,
    scale: float,
    softcap: float | None = None,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """Attends from the new tokens of several requests to all tokens before them and to themselves.

    The keys and values of the new tokens must be in the cache already. Nothing is read back from the device, so that a
    CUDA graph can record it.

    Args:
        query: [num_tokens, num_heads, head_dim], the last dim contiguous.
        key_cache, value_cache: [num_blocks, block_size, num_kv_heads, head_dim], of one layout; block_size a power of 2
            of at least 16.
        block_tables: [num_requests, max_blocks] int32.
        past_lens: [num_requests] int32: tokens before the new ones.
        tiles: of the new tokens.
        scale: what scores are multiplied with.
        softcap: scores become softcap * tanh(score / softcap).
        sliding_window: how many tokens a token sees, itself included.

    Returns:
        [num_tokens, num_heads, head_dim], of the query's dtype.
    """
    _, num_heads, head_dim = query.shape
    block_size, num_kv_heads = key_cache.shape[1:3]
    assert key_cache.stride() == value_cache.stride() and key_cache.stride(3) == 1 and query.stride(2) == 1
    assert num_heads % num_kv_heads == 0, f"{num_heads} heads do not share {num_kv_heads} key-value heads evenly"
    assert block_size >= MIN_ROWS and block_size & (block_size - 1) == 0, f"block_size is {block_size}"
    group = num_heads // num_kv_heads
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    assert out.stride() == query.stride(), "the query is contiguous"
    _paged_attention_kernel[(len(tiles.requests), num_kv_heads)](
        out,
        query,
        key_cache,
        value_cache,
        block_tables,
        tiles.requests,
        tiles.firsts,
        tiles.query_begins,
        past_lens,
        scale,
        softcap or 0.0,
        sliding_window or 0,
        query.stride(0),
        query.stride(1),
        key_cache.stride(0),
        key_cache.stride(1),
        key_cache.stride(2),
        block_tables.stride(0),
        GROUP=group,
        HEAD_DIM=head_dim,
        PADDED_HEAD_DIM=max(MIN_ROWS, triton.next_power_of_2(head_dim)),
        BLOCK_SIZE=block_size,
        BLOCK_Q=tiles.block_q,
        BLOCK_M=max(MIN_ROWS, triton.next_power_of_2(tiles.block_q * group)),
        HAS_SOFTCAP=softcap is not None,
        HAS_WINDOW=sliding_window is not None,
    )
    return out
