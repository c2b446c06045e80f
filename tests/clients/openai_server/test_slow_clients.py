"""Clients that send or read too slowly, and a Triton that is not there: short limits, in this process."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from clients.openai_server.app import create_app
from clients.openai_server.protocol import with_limits
from clients.openai_server.settings import Limits, Settings
from compiler.addresses import free_port
from tests.clients.openai_server.http_calls import chat, sent_inputs
from tests.serving import Served

LIMITS = Limits(head_s=0.2, body_s=0.2, write_stall_s=0.2)
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 50\r\n\r\n"


@contextmanager
def _serving(app: Any) -> Iterator[int]:
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, http=with_limits(LIMITS), ws="none", log_config=None, timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        while not server.started:
            time.sleep(0.005)
        yield int(listening.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """A front end in front of nothing."""
    folder: Path = tmp_path_factory.mktemp("empty")
    with _serving(create_app(Settings(f"127.0.0.1:{free_port('127.0.0.1')}", folder, limits=LIMITS))) as found:
        yield found


def _read_to_end(port: int, *parts: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        for part in parts:
            connection.sendall(part)
        found = b""
        while data := connection.recv(65536):
            found += data
        return found


def test_a_head_that_does_not_come(port: int) -> None:
    assert _read_to_end(port) == b""
    assert _read_to_end(port, b"GET /health HTTP/1.1\r\n").startswith(b"HTTP/1.1 408 ")
    assert _read_to_end(port, b"GET /health HTTP/1.1\r\na: b\r\n").startswith(b"HTTP/1.1 408 ")


def test_a_body_that_does_not_come(port: int) -> None:
    answer = _read_to_end(port, HEAD, b'{"model": ')
    assert answer.startswith(b"HTTP/1.1 408 ") and b'"code": "timeout"' in answer


def test_a_client_that_does_not_read(port: int) -> None:
    """Its connection is cut, and what was being made for it ends."""
    ended = threading.Event()

    async def endless(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        try:
            while (await _next_or_none(receive)) is None:
                await send({"type": "http.response.body", "body": bytes(1 << 20), "more_body": True})
        finally:
            ended.set()

    with _serving(endless) as other, socket.create_connection(("127.0.0.1", other)) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert ended.wait(30)


async def _next_or_none(receive: Any) -> Any:
    """A disconnection where there is one by now."""
    import asyncio

    while True:
        try:
            message = await asyncio.wait_for(receive(), 0.001)
        except asyncio.TimeoutError:
            return None
        if message["type"] == "http.disconnect":
            return message


def test_without_triton_requests_and_readiness_are_unavailable(port: int) -> None:
    body = b'{"model": "x", "prompt": "hi"}'
    head = HEAD.replace(b"50", str(len(body)).encode()).replace(b"host: x", b"host: x\r\nconnection: close")
    answer = _read_to_end(port, head, body)
    assert answer.startswith(b"HTTP/1.1 503 ") and b"retry-after: 1" in answer and b'"unavailable"' in answer
    answer = _read_to_end(port, b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 503 ")
    answer = _read_to_end(port, b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 ") and b"http_requests_total" in answer


def test_an_answer_that_takes_too_long_is_ended(front: Served, folder: Path) -> None:
    """Before its first token by a status, later by an event; the engine is given no deadline of ours."""
    settings = Settings(front.grpc, folder / "repository", limits=Limits(request_s=0.5))
    slow = [{"text": ["a"], "reason": ["None"]}, {"text": ["b"], "reason": ["stop"], "sleep_s": 3}]
    with _serving(create_app(settings)) as port:
        short = replace(front, openai=f"http://127.0.0.1:{port}/v1")
        late = chat(short, slow)
        assert late.status == 503 and late.error["code"] == "deadline_exceeded"
        events = chat(short, slow, stream=True).body.decode().strip().split("\n\n")
        assert '"content":"a"' in events[1] and '"deadline_exceeded"' in events[-1]
        assert sent_inputs(chat(short))["deadline_ms"] is None
