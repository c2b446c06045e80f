"""The torch runner on the GPU's kernel against itself on plain attention; in Triton's interpreter where no GPU is."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from backends.llm.engine.outputs import BlockId, RequestId, ScheduledRequest, SchedulerOutput
from backends.llm.runners.torch_runner import TorchOptions, torch_runner
from compiler.errors import UsageError
from tests.backends.llm.runners.tiny_models import VOCAB, build

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="pip install triton")


def compare(name: str, device: str) -> None:
    """Computes two mixed steps both ways; the windows of 24 tokens are passed."""
    model = build(name)[1]
    kernel, plain = (
        torch_runner(model, TorchOptions(kv_cache_bytes=1 << 21, device=device, attention=attention))
        for attention in ("kernel", "plain")
    )
    first, second = np.random.default_rng(5).integers(0, VOCAB, (2, 44)).tolist()
    tables = [[BlockId(b) for b in table] for table in ([6, 1, 4], [2, 7, 0])]
    steps = [
        SchedulerOutput((ScheduledRequest(RequestId("a"), first[:41], 0, tables[0], 41),)),
        SchedulerOutput(
            (
                ScheduledRequest(RequestId("b"), second, 0, tables[1], 44),
                ScheduledRequest(RequestId("a"), first[41:42], 41, tables[0], 1),
            )
        ),
        SchedulerOutput((ScheduledRequest(RequestId("a"), first[42:], 42, tables[0], 2),)),
    ]
    for step in steps:
        wanted = plain.execute(step).logits
        assert wanted.std() > 0.5
        np.testing.assert_allclose(kernel.execute(step).logits, wanted, atol=1e-4)


def test_the_runner_on_the_kernel_in_the_interpreter_equals_plain_attention() -> None:
    """Triton reads TRITON_INTERPRET when it is imported, so the comparison has a process of its own."""
    code = "from tests.backends.llm.runners.test_torch_kernel import compare\n"
    code += "for name in ('llama', 'gemma3'): compare(name, 'cpu')"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr[-3000:]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_the_runner_on_the_kernel_on_a_gpu_equals_plain_attention(name: str) -> None:
    compare(name, "cuda")


def test_options_are_checked() -> None:
    with pytest.raises(UsageError, match="block_size is 24; the kernel wants a power of 2 of at least 16"):
        TorchOptions(attention="kernel", block_size=24)
    with pytest.raises(UsageError, match="dtype is 'int8'; allowed: float32, bfloat16, float16"):
        TorchOptions(dtype="int8")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="device is 'tpu'; allowed: auto, cpu, cuda, cuda:N"):
        TorchOptions(device="tpu")
