"""Versions of a model on the real server: one that is pinned (e05), and two with a share of the users each (e10)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from clients import GrpcClient, ServerError, VersionSplit
from compiler.pins import pin
from compiler.repository import Repository
from tests.compiler.onnx_models import BIAS, SPEC, WEIGHT
from tests.compiler.test_pins import build
from tests.serving import serve

X = np.random.default_rng(1).standard_normal((2, 16)).astype(np.float32)


def _answer(version: int) -> np.ndarray:
    return X @ WEIGHT + BIAS + np.float32(version)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrpcClient]:
    folder = tmp_path_factory.mktemp("versions")
    store = Repository(folder / "repo")
    for version in range(1, 6):
        build(folder, store.path, version)
    for version in (1, 2):
        build(folder, store.path, version, SPEC.replace("name: linear", "name: canary"))
    pin(store, "linear", [3])
    pin(store, "canary", [1, 2])
    with serve(store.path) as served, GrpcClient(served.grpc) as found:
        yield found


def test_e05_of_five_versions_the_third_answers(client):
    assert client.metadata("linear").versions == ("3",)
    for version in ("", "3"):
        assert np.allclose(client.infer("linear", {"x": X}, version=version)["y"], _answer(3), atol=1e-5)
    for version in ("1", "2", "4", "5"):
        with pytest.raises(ServerError, match="not found"):
            client.infer("linear", {"x": X}, version=version)


def test_e10_a_tenth_of_the_users_gets_the_second_version(client):
    """Each user always the same one; the server's own counters agree."""
    split, users = VersionSplit({"1": 90, "2": 10}), [f"user {n}" for n in range(500)]
    got: Counter[str] = Counter()
    of_user: dict[str, set[str]] = {}
    for user in users * 2:
        version = split.choose(user)
        answer = client.infer("canary", {"x": X}, version=version)["y"]
        assert np.allclose(answer, _answer(int(version)), atol=1e-5)
        got[version] += 1
        of_user.setdefault(user, set()).add(version)
    assert all(len(versions) == 1 for versions in of_user.values())
    share = got["2"] / len(users) / 2
    assert abs(share - 0.1) < 4 * math.sqrt(0.1 * 0.9 / len(users))
    counted = {
        entry["version"]: int(entry["inference_stats"]["success"]["count"]) for entry in client.statistics("canary")
    }
    assert counted == got
