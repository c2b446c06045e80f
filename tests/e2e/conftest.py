"""The demo's pipeline, built once and served once on a real tritonserver."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving import ROOT, Served, run_compile, serve

SPECS = ROOT / "ensembles" / "text_embedding"


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with encoder, tokenizer and ensemble."""
    path = tmp_path_factory.mktemp("demo") / "model_repository"
    done = run_compile("build", SPECS, "-r", path)
    assert done.returncode == 0, done.stderr
    return path


@pytest.fixture(scope="session")
def served(repository: Path) -> Iterator[Served]:
    with serve(repository, "--openai-port", "0") as server:
        yield server
