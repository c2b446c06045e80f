"""The outermost layer: keys, request ids, errors as JSON, one log line and the metrics of each request."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from clients.openai_server.answers import event
from clients.openai_server.body import ClientGone
from clients.openai_server.errors import ApiError, internal_error, unavailable
from clients.openai_server.metrics import RequestMetrics
from clients.openai_server.request_record import RequestRecord, put_record

log = logging.getLogger("modelkiln.openai")
access_log = logging.getLogger("modelkiln.openai.access")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_NEEDS_KEY = "/v1"


class Front:
    """An ASGI application around another one.

    Args:
        api_key: what clients must send for paths under /v1; empty lets everyone in.
    """

    def __init__(self, app: App, metrics: RequestMetrics, api_key: str = "") -> None:
        self._app = app
        self._metrics = metrics
        self._key = api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = dict(scope["headers"])
        record = RequestRecord(_request_id(headers), scope["method"], scope["path"])
        put_record(scope, record)
        answer = _Answer(record, send)
        # HEAD is GET whose body the server leaves out: load balancers ask for a server's health so.
        asked = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
        with self._metrics.in_progress():
            try:
                self._check_key(scope["path"], headers)
                await self._app(asked, receive, answer.send)
            except ApiError as error:
                await answer.fail(error)
            except ClientGone:
                pass
            except asyncio.CancelledError:  # by uvicorn alone, when it stops and has waited long enough
                await answer.fail(unavailable("the server is stopping"))
            except Exception as error:
                log.exception("request %s failed", record.request_id)
                await answer.fail(internal_error(type(error).__name__))
            finally:
                self._metrics.observe(record, asked)
                _write_line(record)

    def _check_key(self, path: str, headers: dict[bytes, bytes]) -> None:
        if not self._key or not path.startswith(_NEEDS_KEY):
            return
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        # In constant time: how long it takes tells nothing of how much of a key is right.
        if scheme.lower() != b"bearer" or not hmac.compare_digest(given.strip(), self._key):
            raise ApiError(
                401,
                "the API key is missing or wrong; send it as 'Authorization: Bearer KEY'",
                type="authentication_error",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )


class _Answer:
    """A response on its way out: knows whether it has begun, and ends it with an error where that comes up."""

    def __init__(self, record: RequestRecord, send: Send) -> None:
        self._record = record
        self._send = send
        self._started = False
        self._ended = False

    async def send(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self._started = True
            self._record.status = message["status"]
            message["headers"] = [*message["headers"], (b"x-request-id", self._record.request_id.encode())]
        else:
            self._ended = not message.get("more_body", False)
        await self._send(message)

    async def fail(self, error: ApiError) -> None:
        self._record.error_type = error.type
        if not self._started:
            body = error.body()
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
            headers += [(name.encode(), value.encode()) for name, value in error.headers.items()]
            await self.send({"type": "http.response.start", "status": error.status, "headers": headers})
            await self.send({"type": "http.response.body", "body": body})
        elif self._record.is_stream and not self._ended:
            # The status is sent already: clients find the error as an event, and no [DONE] after it.
            await self.send({"type": "http.response.body", "body": event(error.to_json())})


def _request_id(headers: dict[bytes, bytes]) -> str:
    """Returns the client's id for the request where it is printable, else a new one."""
    given = headers.get(b"x-request-id", b"")
    return given.decode() if _REQUEST_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"


def _write_line(record: RequestRecord) -> None:
    ttft = "-" if record.first_token_s is None else f"{record.first_token_s * 1e3:.1f}"
    access_log.info(
        "%s %s %s status=%d id=%s model=%s prompt_tokens=%d cached_tokens=%d completion_tokens=%d ttft_ms=%s "
        "duration_ms=%.1f%s",
        "openai",
        record.method,
        ascii(record.path)[1:-1][:200],
        record.status,
        record.request_id,
        record.model or "-",
        record.usage.prompt_tokens,
        record.usage.cached_tokens,
        record.usage.completion_tokens,
        ttft,
        record.duration_s * 1e3,
        f" error={record.error_type}" if record.error_type else "",
    )
