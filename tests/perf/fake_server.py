"""A KServe server over HTTP whose latency and answers a test chooses, to check the load generator's sums."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

OK = b'{"outputs":[]}'

_METADATA = {
    "name": "fake",
    "versions": ["1"],
    "inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [-1, 4]}],
    "outputs": [{"name": "OUTPUT0", "datatype": "FP32", "shape": [-1, 4]}],
}
_DOCUMENTS: dict[str, Any] = {
    "/v2": {"name": "fake-triton", "version": "0", "extensions": []},
    "/v2/models/fake": _METADATA,
    "/v2/models/fake/config": {"name": "fake", "max_batch_size": 8, "backend": "fake"},
    "/v2/models/fake/stats": {"model_stats": []},
    "/v2/models/stats": {"model_stats": [{"name": "fake"}, {"name": "other"}]},
}


class FakeServer:
    """Answers inference number n (from 0) after `latency_s(n)` seconds with `answer(n)`: a status and a body.

    A status of 0 closes the connection without an answer. `chunked` sends bodies in chunks of 3 bytes.
    """

    def __init__(self) -> None:
        self.latency_s: Callable[[int], float] = lambda number: 0.0
        self.answer: Callable[[int], tuple[int, bytes]] = lambda number: (200, OK)
        self.chunked = False
        self.requests: list[bytes] = []
        self.address = ""
        self.stop_listening: Callable[[], None] = lambda: None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                fields = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:-2])
                body = await reader.readexactly(int(fields.get("content-length", 0)))
                path = head.split(" ")[1]
                status, answer = await self._infer(body) if path.endswith("/infer") else _look_up(path)
                if status == 0:
                    return
                writer.write(self._encode(status, answer))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _infer(self, body: bytes) -> tuple[int, bytes]:
        number = len(self.requests)
        self.requests.append(body)
        await asyncio.sleep(self.latency_s(number))
        return self.answer(number)

    def _encode(self, status: int, body: bytes) -> bytes:
        if not self.chunked:
            return b"HTTP/1.1 %d Text\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body)
        pieces = [body[at : at + 3] for at in range(0, len(body), 3)]
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
        return b"HTTP/1.1 %d Text\r\nTransfer-Encoding: chunked\r\n\r\n%b0\r\n\r\n" % (status, chunks)


def _look_up(path: str) -> tuple[int, bytes]:
    if path in _DOCUMENTS:
        return 200, json.dumps(_DOCUMENTS[path]).encode()
    return 404, b'{"error":"unknown"}'


@contextmanager
def run_fake_server() -> Iterator[FakeServer]:
    """A fake server in a thread of its own, gone at the end."""
    fake = FakeServer()
    loop = asyncio.new_event_loop()
    server = loop.run_until_complete(asyncio.start_server(fake.serve, "127.0.0.1", 0))
    fake.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    fake.stop_listening = server.close
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield fake
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        server.close()
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()
