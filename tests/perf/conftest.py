"""A fake server whose latency and errors a test chooses: arithmetic needs known answers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.perf.fake_server import FakeServer, run_fake_server


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    """A server whose latency and answers the test chooses."""
    with run_fake_server() as server:
        yield server
