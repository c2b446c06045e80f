"""Decode steps over recorded buffers: in Triton's interpreter, where a recording is run again in place of a replay."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from backends.llm.engine.outputs import BlockId, RequestId, ScheduledRequest, SchedulerOutput
from tests.backends.llm.runners.tiny_models import VOCAB, build

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="pip install triton")

BLOCKS, TABLES = 12, {"a": [6, 1, 4], "b": [2, 7, 0], "c": [11, 3, 9]}


def again(step: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
    """Stands for a recording where there is no GPU: over the same buffers, into the same memory."""
    logits = step()
    return lambda: logits.copy_(step()), logits


def step_of(*requests: tuple[str, list[int], int]) -> SchedulerOutput:
    """Name, new tokens, tokens before; logits of the last token only."""
    return SchedulerOutput(
        tuple(
            ScheduledRequest(RequestId(name), tokens, past, [BlockId(b) for b in TABLES[name]], 1)
            for name, tokens, past in requests
        )
    )


def compare(name: str, device: str) -> None:
    """Prompts, then decodes of 3, 1, 2 and 3 rows: two recordings are used twice, with fewer rows than they have."""
    from backends.llm.runners.decode_graphs import cuda_capture
    from backends.llm.runners.torch_runner import TorchRunner

    model = build(name)[1]
    recordings: list[int] = []
    capture = again if device == "cpu" else cuda_capture(torch.device(device))

    def counted(step: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        recordings.append(1)
        return capture(step)

    graphs = TorchRunner(model, num_blocks=BLOCKS, device=device, attention="kernel", capture=counted)
    plain = TorchRunner(model, num_blocks=BLOCKS, device=device)
    ids = np.random.default_rng(7).integers(0, VOCAB, (3, 48)).tolist()
    a, b, c = ids
    steps = [
        step_of(("a", a[:30], 0), ("b", b[:9], 0), ("c", c[:16], 0)),
        step_of(("a", a[30:31], 30), ("b", b[9:10], 9), ("c", c[16:17], 16)),
        step_of(("b", b[10:11], 10)),
        step_of(("c", c[17:18], 17), ("a", a[31:32], 31)),
        step_of(("a", a[32:33], 32), ("c", c[18:19], 18), ("b", b[11:12], 11)),
        step_of(("b", b[12:16], 12), ("a", a[33:34], 33)),  # not one for a graph
        step_of(("b", b[16:17], 16)),
    ]
    for step in steps:
        wanted = plain.execute(step).logits
        assert wanted.std() > 0.5
        np.testing.assert_allclose(graphs.execute(step).logits, wanted, atol=1e-4)
    assert len(recordings) == 3  # of 4, 1 and 2 rows


def in_the_interpreter(call: str) -> None:
    """Triton reads TRITON_INTERPRET when it is imported, so this has a process of its own."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    code = f"from {__name__} import *\n{call}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]


def test_recorded_decodes_equal_plain_attention() -> None:
    in_the_interpreter("for name in ('llama', 'gemma3'): compare(name, 'cpu')")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU: run tests/gpu/run.sh on one")
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_cuda_graphs_of_decodes_equal_plain_attention(name: str) -> None:
    compare(name, "cuda")


def spare_rows_are_harmless() -> None:
    """What the rows that are left over write is in no block of a request, and NaN there reaches nobody."""
    from backends.llm.runners.torch_runner import TorchRunner

    model = build("llama")[1]
    runner = TorchRunner(model, num_blocks=BLOCKS, attention="kernel", capture=again)
    cache = runner._attention.cache
    assert cache.keys.shape[1] == BLOCKS + 1
    requests = [("a", [5], 0), ("b", [6], 0), ("c", [7], 0)]
    before = runner.execute(step_of(*requests)).logits.copy()
    cache.keys[:, BLOCKS] = torch.nan
    cache.values[:, BLOCKS] = torch.nan
    cache.keys[:, :BLOCKS] = 0
    cache.values[:, :BLOCKS] = 0
    np.testing.assert_array_equal(runner.execute(step_of(*requests)).logits, before)
    written = {int(block) for block in cache.keys[0, :BLOCKS].abs().sum((1, 2, 3)).nonzero()}
    assert written == {TABLES[name][0] for name, _, _ in requests}


def test_spare_rows_are_harmless() -> None:
    in_the_interpreter("spare_rows_are_harmless()")


def test_a_recorded_step_reads_nothing_back_and_mixes_no_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a capture forbids fails on torch's meta device, too, where tensors have shapes and no numbers."""
    from backends.llm.models.decoder import Decoder
    from backends.llm.runners import paged_attention
    from backends.llm.runners.decode_graphs import DecodeGraphs
    from backends.llm.runners.step_attention import PagedCache

    launches = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            return lambda *arguments, **constants: launches.append((grid, arguments))

    monkeypatch.setattr(paged_attention, "_paged_attention_kernel", Kernel())
    model = build("gemma3")[1]
    config = model.config
    shape = (config.num_hidden_layers, BLOCKS + 1, 16, config.num_key_value_heads, config.head_dim)
    cache = PagedCache(*(torch.zeros(shape, device="meta") for _ in "kv"))
    seen = []

    def capture(step: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        seen.append(step())
        return lambda: None, seen[0]

    decoder = Decoder(model, device="meta")
    graphs = DecodeGraphs(decoder, config, cache, spare_block=BLOCKS, max_blocks=4, capture=capture)
    recorded = graphs._record(4)
    assert recorded.logits.shape == (4, config.vocab_size) and len(seen) == 1
    assert len(launches) == config.num_hidden_layers
    for grid, arguments in launches:
        assert grid == (4, config.num_key_value_heads)
        assert {a.device.type for a in arguments if isinstance(a, torch.Tensor)} == {"meta"}
