"""A request's body: read within limits, parsed, and checked against its schema."""

from __future__ import annotations

import asyncio
import logging
import math
import reprlib
import time
from collections.abc import Awaitable, Callable, MutableMapping
from itertools import islice
from typing import Any, TypeVar

import pydantic
import pydantic_core

from clients.openai_server.errors import ApiError
from clients.openai_server.settings import Limits

log = logging.getLogger("modelkiln.openai")

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Model = TypeVar("Model", bound=pydantic.BaseModel)
_SHORT = reprlib.Repr()  # of a value of any size
_SHORT.maxstring = 80
CHUNK_COUNT = "modelkiln.chunks"  # of a scope's extensions: chunks of the body so far, counted by protocol.py


class ClientGone(Exception):
    """The client closed the connection: there is nobody to answer."""


class BodyReader:
    """Reads bodies; knows how much is being read at once.

    Attributes:
        held_bytes: of bodies that are being read.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.held_bytes = 0

    async def read(self, scope: MutableMapping[str, Any], receive: Receive) -> bytes:
        """Returns the whole body.

        Raises:
            ApiError: 413 for one that is too long, 415 for one that is no plain JSON by its own account, 408 for one
                that comes too slowly, 503 when too much is being read at once.
            ClientGone: the connection ended first.
        """
        headers = dict(scope["headers"])
        _check_type(headers.get(b"content-type", b""))
        _check_encoding(headers.get(b"content-encoding", b""))
        declared = headers.get(b"content-length", b"0")
        if declared.isdigit() and int(declared[:20]) > self._limits.body_bytes:
            raise self._too_long()
        parts: list[bytes] = []
        held = 0
        end = time.monotonic() + self._limits.body_s
        try:
            more = True
            while more:
                message = await self._next(receive, end)
                part = message.get("body", b"")
                more = message.get("more_body", False)
                parts.append(part)
                held += len(part)
                self.held_bytes += len(part)
                self._check(held, scope)
        finally:
            self.held_bytes -= held
        return b"".join(parts)

    async def _next(self, receive: Receive, end: float) -> MutableMapping[str, Any]:
        try:
            message = await asyncio.wait_for(receive(), max(0.0, end - time.monotonic()))
        except asyncio.TimeoutError:
            raise ApiError(
                408,
                f"the body did not come within {self._limits.body_s:g} seconds",
                code="timeout",
                headers={"connection": "close"},
            ) from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        return message

    def _check(self, held: int, scope: MutableMapping[str, Any]) -> None:
        if held > self._limits.body_bytes:
            raise self._too_long()
        if scope.get("extensions", {}).get(CHUNK_COUNT, {}).get("seen", 0) > self._limits.chunks:
            raise ApiError(413, f"the body has more than {self._limits.chunks} chunks", code="request_too_large")
        if self.held_bytes > self._limits.all_bodies_bytes:
            raise ApiError(
                503,
                "too many large requests are being read at once; try again later",
                type="server_error",
                code="unavailable",
                headers={"retry-after": "1"},
            )

    def _too_long(self) -> ApiError:
        return ApiError(413, f"the body is longer than {self._limits.body_bytes} bytes", code="request_too_large")


def parse_body(body: bytes, model: type[Model], limits: Limits) -> Model:
    """Returns the request in a body.

    Fields that the schema does not know are ignored and logged, as the OpenAI API has it.

    Raises:
        ApiError: 400, or 413 where it holds too many values.
    """
    data = json_from_bytes(body, limits)
    if not isinstance(data, dict):
        raise ApiError(400, f"the body is a JSON {_json_type(data)}; allowed: an object")
    unknown = sorted(islice((name for name in data if name not in model.model_fields), 10))
    if unknown:
        log.info("ignored fields that are not known: %s", ", ".join(repr(name[:40]) for name in unknown))
    try:
        return model.model_validate(data)
    except pydantic.ValidationError as error:
        raise _schema_error(error, data) from None


def json_from_bytes(body: bytes, limits: Limits) -> Any:
    """Returns the parsed body.

    Raises:
        ApiError: it is no JSON (NaN, infinite numbers and halves of surrogate pairs are none), or goes too far.
    """
    # Counting bytes costs little, whatever the body; parsing millions of values would hold up everybody else.
    values = sum(body.count(mark) for mark in (b",", b"[", b"{"))
    if values > limits.json_values:
        raise ApiError(
            413, f"the body has more than {limits.json_values} commas and brackets", code="request_too_large"
        )
    try:
        data = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        if "recursion limit" in str(error):
            raise _too_deep(limits) from None
        if str(error).startswith("EOF"):
            message = f"the body is cut: it ends within its JSON, after {len(body)} bytes"
            raise ApiError(400, message, code="invalid_json") from None
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    _check_values(data, limits)
    return data


def _check_values(data: Any, limits: Limits) -> None:
    """Refuses what is nested too deep, and numbers that are too large for a float (1e999 is parsed as infinity)."""
    level = [data]
    for _ in range(limits.json_depth + 1):
        deeper: list[Any] = []
        for value in level:
            if type(value) is dict:
                deeper.extend(value.values())
            elif type(value) is list:
                deeper.extend(value)
            elif type(value) is float and not math.isfinite(value):
                raise ApiError(400, "the body holds a number that is too large", code="invalid_json")
        if not deeper:
            return
        level = deeper
    raise _too_deep(limits)


def _too_deep(limits: Limits) -> ApiError:
    return ApiError(400, f"the body is nested deeper than {limits.json_depth} levels", code="invalid_json")


def _check_type(content_type: bytes) -> None:
    # A web page can make a browser send other types to this address without asking, but not this one.
    kind = content_type.split(b";")[0].strip().lower()
    if kind != b"application/json":
        shown = kind.decode("latin-1")[:80]
        raise ApiError(
            415, f"the content type is {shown!r}; allowed: 'application/json'", code="unsupported_media_type"
        )


def _check_encoding(content_encoding: bytes) -> None:
    # A megabyte may be the gzip of a gigabyte.
    if content_encoding.strip().lower() not in (b"", b"identity"):
        shown = content_encoding.decode("latin-1")[:80]
        raise ApiError(
            415,
            f"the content encoding is {shown!r}; send the body as it is",
            code="unsupported_media_type",
        )


def _schema_error(error: pydantic.ValidationError, data: Any) -> ApiError:
    """Returns the first fault, by the path of the field as clients write it: messages.0.role."""
    faults = error.errors(include_url=False, include_context=False)
    # Where several forms are allowed there is a fault for each: the deepest one is of the form that was meant, or one
    # of the right type.
    of_field = [fault for fault in faults if fault["loc"][:1] == faults[0]["loc"][:1]]
    path, fault = max(
        ((_path(fault, data), fault) for fault in of_field),
        key=lambda found: (len(found[0]), not found[1]["type"].endswith("_type")),
    )
    param = ".".join(path) or None
    seen = _SHORT.repr(fault["input"])
    seen = seen if len(seen) <= 80 else seen[:77] + "..."
    reason = fault["msg"].removeprefix("Value error, ")
    return ApiError(400, f"{param or 'the body'}: {reason} (seen: {seen})", param=param, code="invalid_value")


def _path(fault: Any, data: Any) -> list[str]:
    path: list[str] = []
    for part in fault["loc"]:
        # Of a union pydantic names the branch too, which is nothing that the client wrote.
        if isinstance(data, dict) and (part in data or fault["type"] == "missing"):
            data = data.get(part)
        elif isinstance(data, list) and isinstance(part, int):
            data = data[part]
        else:
            continue
        path.append(str(part)[:60])
    return path


def _json_type(value: Any) -> str:
    names = {list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")
