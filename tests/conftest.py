"""The real server with small models, started once for all tests that need it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.triton_models import TritonAddress, run_triton


@pytest.fixture(scope="session")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonAddress]:
    """The addresses of a real server with the test models."""
    with run_triton(tmp_path_factory.mktemp("triton")) as address:
        yield address


@pytest.fixture(scope="session")
def echo_server(triton: TritonAddress) -> tuple[str, str]:
    """(http_url, grpc_url) of the real server."""
    return triton.http_url, triton.grpc_url
