"""The compiled file against the eager model, in turn, with the same threads and inputs.

In blocks: after a call the threads of either runtime spin for a while and would take the cores from the other,
so each block begins with calls that are not counted.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from compiler.cases import make_case
from compiler.repository import Repository
from compiler.sources.factory import load_module
from compiler.spec import model_spec_from_file
from compiler.targets.registry import target_named

LENGTH = 128
BATCHES = (1, 8)
ROUNDS = 9
BLOCK_WARMUP, BLOCK_CALLS = 2, 5


def bench_compiled(spec_path: Path, model: Path, threads: int) -> None:
    """Prints median milliseconds of both and the median of the ratios, round by round."""
    import torch

    torch.set_num_threads(threads)
    spec = model_spec_from_file(spec_path)
    module = load_module(spec)
    version = Repository(model.parent).latest(model.name)
    assert version is not None
    compiled = target_named(spec.target).open(version.folder, threads, version.manifest["artifact"])
    assert compiled is not None
    blocks = f"{ROUNDS} rounds of {BLOCK_CALLS} calls"
    print(f"Compiled against PyTorch eager, {spec.name}, sequence {LENGTH}, fp32, {blocks}")
    print(f"{'batch':>6} {'eager ms':>10} {'compiled ms':>12} {'ratio':>7} {'of the rounds':>14} {'max abs diff':>13}")
    for batch in BATCHES:
        inputs = make_case(spec, "bench", {"batch": batch, "length": LENGTH}, padded=False).inputs
        tensors = {name: torch.from_numpy(np.array(array)) for name, array in inputs.items()}

        def eager(tensors: dict[str, torch.Tensor] = tensors) -> np.ndarray:  # type: ignore[type-arg]
            with torch.inference_mode():
                return module(**tensors).numpy()  # type: ignore[no-any-return]

        def optimised(inputs=inputs) -> np.ndarray:  # type: ignore[no-untyped-def, type-arg]
            return compiled(inputs)["embedding"]

        difference = float(np.abs(eager() - optimised()).max())
        pairs = [(_block_ms(eager), _block_ms(optimised)) for _ in range(ROUNDS)]
        ratios = [a / b for a, b in pairs]
        before, after = (statistics.median(column) for column in zip(*pairs, strict=True))
        print(
            f"{batch:>6} {before:>10.1f} {after:>12.1f} "
            f"{statistics.median(ratios):>6.2f}x {f'{min(ratios):.2f}-{max(ratios):.2f}':>14} {difference:>13.1e}"
        )
    print()


def _block_ms(call: Callable[[], object]) -> float:
    """Returns the median time of one call in a block, in milliseconds."""
    times = []
    for _ in range(BLOCK_WARMUP + BLOCK_CALLS):
        started = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - started) / 1e6)
    return statistics.median(times[BLOCK_WARMUP:])
