"""The short form of `make chaos`: the same faults, fewer of them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.fuzz import run_fuzz
from tests.chaos.kills import run_kills
from tests.chaos.model import Known, known_answers, write_repository
from tests.chaos.signals import run_signals
from tests.chaos.streams import run_streams
from tests.serving import Served, serve

SEED = 20261130


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chaos") / "repository"
    write_repository(path)
    return path


@pytest.fixture(scope="module")
def known(repository: Path) -> list[Known]:
    """Prompts of all lengths up to the limit, and the answers of the engine alone."""
    return known_answers(repository, 16, random.Random(SEED))


@pytest.fixture(scope="module")
def served(repository: Path) -> Iterator[Served]:
    with serve(repository, "--max-restarts", "100", log=repository.parent / "log") as served:
        yield served


def test_streams_cancels_and_malformed_requests_side_by_side(served, known):
    report = asyncio.run(run_streams(served, known, seconds=3, streams=24, seed=SEED))
    assert report.wrong == []
    assert report.counts["answered"] and report.counts["cancelled"] and report.counts["malformed"]


def test_f03_requests_made_up_at_random(served, known):
    report = asyncio.run(run_fuzz(served, known, count=300, seed=SEED))
    assert report.wrong == []
    assert sum(report.counts.values()) > 300 and report.counts["gRPC, answered"] and report.counts["gRPC, error"]


def test_a_killed_language_model_breaks_its_streams_off_and_comes_back(served, known):
    report = asyncio.run(run_kills(served, known, count=1, seed=SEED))
    assert report.wrong == []
    assert report.back_s and report.told_s and report.bystander


def test_sigterm_at_any_moment(repository):
    report = run_signals(repository, count=2, seed=SEED)
    assert report.wrong == []
