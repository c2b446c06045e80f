"""The kernels are for processors with VNNI; elsewhere the tests that run them are left out."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import pytest

from backends.llm.runners.cpu import machine_lacks

collect_ignore_glob = [] if importlib.util.find_spec("numba") else ["test_*.py"]


def pytest_collection_modifyitems(items: Sequence[pytest.Item]) -> None:
    if lacks := machine_lacks():
        for item in items:
            if "runners/numba" in str(item.path):
                item.add_marker(pytest.mark.skip(reason=lacks))
