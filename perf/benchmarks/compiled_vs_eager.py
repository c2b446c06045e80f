"""The compiled file against the eager model, call by call in turn, with the same threads and inputs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from compiler.cases import make_case
from compiler.repository import Repository
from compiler.source import load_module
from compiler.spec import model_spec_from_file
from compiler.targets.registry import target_named

LENGTH = 128
BATCHES = (1, 8)
WARMUP, ROUNDS = 3, 25


def bench_compiled(spec_path: Path, model: Path, threads: int) -> None:
    """Prints median milliseconds of both and the median of the ratios, round by round."""
    import torch

    torch.set_num_threads(threads)
    spec = model_spec_from_file(spec_path)
    module = load_module(spec)
    version = Repository(model.parent).latest(model.name)
    assert version is not None
    compiled = target_named(spec.target).open(version.folder, threads)
    print(f"Compiled against PyTorch eager, {spec.name}, sequence {LENGTH}, fp32, median of {ROUNDS} rounds in turn")
    print(f"{'batch':>6} {'eager ms':>10} {'compiled ms':>12} {'ratio':>7} {'ratio p10-p90':>15} {'max abs diff':>13}")
    for batch in BATCHES:
        inputs = make_case(spec, "bench", {"batch": batch, "length": LENGTH}, padded=False).inputs
        tensors = {name: torch.from_numpy(np.array(array)) for name, array in inputs.items()}

        def eager(tensors: dict[str, torch.Tensor] = tensors) -> np.ndarray:  # type: ignore[type-arg]
            with torch.inference_mode():
                return module(**tensors).numpy()  # type: ignore[no-any-return]

        def optimised(inputs=inputs) -> np.ndarray:  # type: ignore[no-untyped-def, type-arg]
            return compiled(inputs)["embedding"]

        difference = float(np.abs(eager() - optimised()).max())
        pairs = [(_ms(eager), _ms(optimised)) for _ in range(WARMUP + ROUNDS)][WARMUP:]
        ratios = sorted(a / b for a, b in pairs)
        low, high = ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]
        before, after = (statistics.median(column) for column in zip(*pairs, strict=True))
        print(
            f"{batch:>6} {before:>10.1f} {after:>12.1f} "
            f"{statistics.median(ratios):>6.2f}x {f'{low:.2f}-{high:.2f}':>15} {difference:>13.1e}"
        )
    print()


def _ms(call: Callable[[], object]) -> float:
    started = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - started) / 1e6
