"""The front end's own metrics, and Triton's passed on."""

from __future__ import annotations

import asyncio
import http.client
import logging
import urllib.request
from collections.abc import MutableMapping
from contextlib import AbstractContextManager
from typing import Any

import prometheus_client

from clients.openai_server.request_record import RequestRecord

log = logging.getLogger("modelkiln.openai")

# vLLM's buckets, so that panels of both can be laid over each other.
_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_DURATION_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
_TRITON_S = 5.0
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class RequestMetrics:
    """Counts requests; names are those that servers of FastAPI commonly have, with the prefix `openai_` for its own."""

    def __init__(self) -> None:
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = prometheus_client.CollectorRegistry()
        common: dict[str, Any] = {"registry": self._registry}
        labels = ("handler", "method")
        self._requests = prometheus_client.Counter(
            "http_requests", "HTTP requests that have ended.", (*labels, "status"), **common
        )
        self._seconds = prometheus_client.Histogram(
            "http_request_duration_seconds", "Until the last byte.", labels, buckets=_DURATION_S, **common
        )
        self._in_progress = prometheus_client.Gauge(
            "openai_requests_in_progress", "HTTP requests that have not ended.", **common
        )
        self._first = prometheus_client.Histogram(
            "openai_time_to_first_token_seconds",
            "From a request's headers to the first token that leaves.",
            ("model_name",),
            buckets=_TTFT_S,
            **common,
        )
        tokens = ("model_name", "kind")
        self._tokens = prometheus_client.Counter("openai_tokens", "Tokens of prompts and answers.", tokens, **common)

    def in_progress(self) -> AbstractContextManager[Any]:
        return self._in_progress.track_inprogress()

    def observe(self, record: RequestRecord, scope: MutableMapping[str, Any]) -> None:
        """Counts a request that has ended. Paths that are no route are one handler: clients make them up."""
        route = scope.get("route")
        handler = getattr(route, "path", "none")
        self._requests.labels(handler, record.method, str(record.status)).inc()
        self._seconds.labels(handler, record.method).observe(record.duration_s)
        if record.model:
            if record.first_token_s is not None:
                self._first.labels(record.model).observe(record.first_token_s)
            self._tokens.labels(record.model, "prompt").inc(record.usage.prompt_tokens)
            self._tokens.labels(record.model, "completion").inc(record.usage.completion_tokens)

    def text(self) -> bytes:
        return prometheus_client.generate_latest(self._registry)


async def all_metrics(own: RequestMetrics, triton_url: str) -> bytes:
    """Returns Triton's metrics and our own; our own alone where Triton does not answer."""
    theirs = b""
    if triton_url:
        try:
            theirs = await asyncio.to_thread(_read, triton_url)
        except (OSError, http.client.HTTPException) as error:  # the latter where it ends in the middle
            log.warning("Triton's metrics at %s cannot be read: %s", triton_url, error)
    return theirs + own.text()


def _read(url: str) -> bytes:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # it is on this machine or near it
    with opener.open(url, timeout=_TRITON_S) as response:
        data: bytes = response.read()
    return data if data.endswith(b"\n") or not data else data + b"\n"
