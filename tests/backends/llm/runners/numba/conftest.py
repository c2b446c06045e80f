"""The kernels are for processors with VNNI; elsewhere the tests that run them are left out."""

from __future__ import annotations

import importlib.util
import platform
from collections.abc import Sequence

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("numba") else ["test_*.py"]


def kernels_run_here() -> bool:
    if importlib.util.find_spec("numba") is None:
        return False
    from backends.llm.runners.cpu import _INSTRUCTIONS
    from backends.llm.runners.numba.compiling import has_features

    return platform.system() == "Linux" and has_features(*_INSTRUCTIONS)


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    if not kernels_run_here():
        for item in items:
            if "runners/numba" in str(item.path):
                item.add_marker(pytest.mark.skip(reason="the processor has no AVX-512 VNNI"))
