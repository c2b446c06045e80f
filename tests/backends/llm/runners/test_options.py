"""Options of the runners: wrong types are refused by name, before anything is opened."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from backends.llm.runners.cpu_options import CpuOptions
from backends.llm.runners.torch_runner import TorchOptions
from compiler.errors import UsageError


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (CpuOptions, "kv_cache_bytes", "1GiB"),
        (CpuOptions, "kv_cache_bytes", 1.5e9),
        (CpuOptions, "kv_cache_bytes", 0),
        (CpuOptions, "num_threads", "2"),
        (CpuOptions, "exact", "no"),
        (CpuOptions, "batch_invariant", 1),
        (CpuOptions, "cache_dir", 5),
        (TorchOptions, "kv_cache_bytes", "1GiB"),
        (TorchOptions, "block_size", 0),
        (TorchOptions, "block_size", 16.0),
        (TorchOptions, "device", "cpu:7"),
        (TorchOptions, "device", None),
    ],
)
def test_options_of_the_wrong_type_are_refused(kind: Any, name: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"{name} is {value!r}; allowed: "):
        kind(**{name: value})


def test_integers_of_numpy_are_taken() -> None:
    options = CpuOptions(kv_cache_bytes=np.int64(1 << 20))  # type: ignore[arg-type]
    assert type(options.kv_cache_bytes) is int
