"""The GPU kernel against plain attention: in Triton's interpreter everywhere, on a GPU where there is one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="pip install triton")

CASES = {
    # heads, kv heads, head_dim, block_size, [(past, new)], softcap, window, dtype
    "decodes": (4, 2, 32, 16, [(5, 1), (16, 1), (0, 1), (47, 1)], None, None, "float32"),
    "prefill": (4, 4, 16, 16, [(0, 37)], None, None, "float32"),
    "mixed": (6, 2, 24, 32, [(40, 1), (0, 19), (33, 70), (64, 1)], None, None, "float32"),
    "one kv head": (8, 1, 64, 16, [(3, 2), (15, 17)], None, None, "float32"),
    "softcap": (4, 2, 32, 16, [(20, 1), (0, 9)], 5.0, None, "float32"),
    "window": (4, 2, 32, 16, [(90, 1), (0, 50), (30, 40)], None, 20, "float32"),
    "window of one block": (2, 1, 16, 16, [(64, 1), (63, 2)], None, 16, "float32"),
    "half": (4, 2, 64, 32, [(40, 1), (0, 19)], None, None, "float16"),
}


def plain_attention(query, keys, values, past, scale, softcap, window):
    """[new, heads, dim] x [past + new, kv heads, dim]: every score written down."""
    group = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1).double(), values.repeat_interleave(group, 1).double()
    scores = torch.einsum("qhd,khd->hqk", query.double(), keys) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    positions = past + torch.arange(query.shape[0])[:, None]
    key_positions = torch.arange(keys.shape[0])[None, :]
    seen = key_positions <= positions
    if window:
        seen &= key_positions > positions - window
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), values)


def compare(name: str, device: str) -> None:
    from backends.llm.runners.paged_attention import paged_attention
    from backends.llm.runners.tiles import Tiles

    heads, kv_heads, dim, block_size, lengths, softcap, window, dtype = CASES[name]
    generator = torch.Generator().manual_seed(len(name))
    tables = [-(-(past + new) // block_size) for past, new in lengths]
    num_blocks = sum(tables) + 3
    shape = (num_blocks, block_size, kv_heads, dim)
    key_cache, value_cache = (torch.full(shape, torch.nan, dtype=getattr(torch, dtype)) for _ in range(2))
    order = torch.randperm(num_blocks, generator=generator).tolist()
    block_tables = torch.full((len(lengths), max(tables)), 2**30, dtype=torch.int32)
    queries, expected = [], []
    for row, ((past, new), count) in enumerate(zip(lengths, tables, strict=True)):
        ids = [order.pop() for _ in range(count)]
        block_tables[row, :count] = torch.tensor(ids)
        keys, values = (torch.randn(past + new, kv_heads, dim, generator=generator).to(key_cache.dtype) for _ in "kv")
        for position in range(past + new):
            key_cache[ids[position // block_size], position % block_size] = keys[position]
            value_cache[ids[position // block_size], position % block_size] = values[position]
        query = torch.randn(new, heads, dim, generator=generator).to(key_cache.dtype)
        queries.append(query)
        expected.append(plain_attention(query, keys, values, past, dim**-0.5, softcap, window))
    begins = torch.tensor([0, *(new for _, new in lengths)]).cumsum(0).to(torch.int32)
    result = paged_attention(
        torch.cat(queries).to(device),
        key_cache.to(device),
        value_cache.to(device),
        block_tables.to(device),
        torch.tensor([past for past, _ in lengths], dtype=torch.int32, device=device),
        Tiles.of(begins, heads // kv_heads, device),
        scale=dim**-0.5,
        softcap=softcap,
        sliding_window=window,
    )
    tolerance = 2e-6 if dtype == "float32" else 2e-3
    torch.testing.assert_close(result.double().cpu(), torch.cat(expected), atol=tolerance, rtol=tolerance)


def test_the_kernel_in_the_interpreter_equals_plain_attention():
    """In a process of its own: Triton reads TRITON_INTERPRET when a kernel is defined."""
    script = f"from {__name__} import CASES, compare\nfor name in CASES: compare(name, 'cpu')"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU: run tests/gpu/run.sh on one")
@pytest.mark.parametrize("name", CASES)
def test_the_kernel_on_a_gpu_equals_plain_attention(name):
    compare(name, "cuda")
