"""PyTorch's exporter reads its whole library of operators anew for each export, half a second; here it is read once."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def read_once(*opsets: int) -> Iterator[None]:
    """Each export gets a copy of its own, so that what one adds to it (our translations) no other finds.

    Args:
        opsets: read now; others are read when an export first asks for them.
    """
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    original = ONNXRegistry.__dict__["from_torchlib"]
    read = functools.cache(ONNXRegistry.from_torchlib)
    for opset in opsets:
        read(opset_version=opset)

    def copied(*arguments: int, **options: int) -> ONNXRegistry:
        whole = read(*arguments, **options)
        copy = ONNXRegistry()
        copy.__dict__.update(whole.__dict__)
        copy.functions = {target: list(found) for target, found in whole.functions.items()}
        return copy

    ONNXRegistry.from_torchlib = staticmethod(copied)
    try:
        yield
    finally:
        ONNXRegistry.from_torchlib = original
