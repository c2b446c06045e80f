"""The real server with small models, started once for all tests that need it."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator

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
