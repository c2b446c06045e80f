"""What is served where something is wrong with one model, and what is told where Triton's metrics are cut."""

from __future__ import annotations

import asyncio
import shutil
import socket
import threading
from pathlib import Path
from typing import Any, cast

import pytest

from clients.async_grpc import AsyncGrpcClient
from clients.openai_server import models as module
from clients.openai_server.errors import ApiError
from clients.openai_server.metrics import RequestMetrics, all_metrics
from clients.openai_server.models import Models
from tests.clients.openai_server.conftest import write_tiny_llm


class _Triton:
    """What Triton says of two models."""

    async def statistics(self, name: str) -> list[dict[str, str]]:
        return [{"name": name, "version": "1"} for name in ("good", "odd")]

    async def config(self, name: str, version: str) -> dict[str, Any]:
        return {"input": [{"name": "input_ids"}], "output": [{"name": "text_output"}]}


def _served(repository: Path) -> dict[str, int | None]:
    async def run() -> dict[str, int | None]:
        found = await Models(cast(AsyncGrpcClient, _Triton()), repository).served()
        return {model.name: cast(module.LanguageModel, model).max_model_len for model in found}

    return asyncio.run(run())


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for name in ("good", "odd"):
        write_tiny_llm(tmp_path / name / "1")
        (tmp_path / name / "1" / "manifest.json").write_text('{"llm": {"max_model_len": 64}}')
    return tmp_path


def test_a_manifest_that_cannot_be_read_says_nothing_of_the_context(repository: Path) -> None:
    (repository / "odd" / "1" / "manifest.json").write_text("[" * 100_000)
    assert _served(repository) == {"good": 64, "odd": None}


def test_what_is_wrong_with_one_model_takes_no_other_away(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = module.load_tokenizer

    def fails_for_odd(path: Path) -> Any:
        if "odd" in str(path.relative_to(repository)):
            raise ZeroDivisionError("of a library")
        return load(path)

    monkeypatch.setattr(module, "load_tokenizer", fails_for_odd)
    assert _served(repository) == {"good": 64}


def test_a_model_that_is_loaded_again_is_not_ready_and_not_unknown(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients try a 503 again, and never a 404; the process of a model may die at any time."""
    monkeypatch.setattr(module, "_FRESH_S", 0.0)

    class Restarting(_Triton):
        loaded = ("good", "odd")

        async def statistics(self, name: str) -> list[dict[str, str]]:
            return [{"name": name, "version": "1"} for name in self.loaded]

    async def run() -> list[tuple[int, str | None]]:
        triton = Restarting()
        models = Models(cast(AsyncGrpcClient, triton), repository)
        assert (await models.language_model("good")).name == "good"
        triton.loaded = ("odd",)
        await models.served()
        found = []
        for name in ("good", "never"):
            with pytest.raises(ApiError) as raised:
                await models.language_model(name)
            found.append((raised.value.status, raised.value.code))
        shutil.rmtree(repository / "good")
        with pytest.raises(ApiError) as raised:
            await models.language_model("good")
        return [*found, (raised.value.status, raised.value.code)]

    assert asyncio.run(run()) == [(503, "unavailable"), (404, "model_not_found"), (404, "model_not_found")]


def test_tritons_metrics_that_end_in_the_middle_leave_our_own() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nnv_cut 1")

        thread = threading.Thread(target=answer)
        thread.start()
        text = asyncio.run(all_metrics(RequestMetrics(), f"http://127.0.0.1:{server.getsockname()[1]}/metrics"))
        thread.join()
    assert b"http_requests" in text and b"nv_cut" not in text
