"""Questions and answers as Triton's HTTP bodies, tensors in binary. Opens no connection."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from clients.errors import DeadlineExceeded, ServerError, server_error
from clients.generation import GetOutput
from clients.protocol import Answer, Arrays, Call, Json, Protocol, check_names
from clients.requests import InferRequest
from clients.shared_memory import SharedTensor
from clients.tensors import decode_array, decode_items

HEADER_LENGTH = "Inference-Header-Content-Length"


@dataclass(frozen=True)
class HttpRequest:
    path: str
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class HttpAnswer:
    """An answer with status 200."""

    body: bytes
    header_length: int | None = None


class HttpProtocol(Protocol):
    def server_ready(self) -> Call[bool]:
        return Call("GET", HttpRequest("/v2/health/ready"), lambda answer: True)

    def model_ready(self, model: str, version: str) -> Call[bool]:
        return Call("GET", HttpRequest(f"{model_path(model, version)}/ready"), lambda answer: True)

    def server_metadata(self) -> Call[Json]:
        return Call("GET", HttpRequest("/v2"), _reading(_json))

    def model_names(self) -> Call[list[str]]:
        def parse(answer: HttpAnswer) -> list[str]:
            return sorted({str(counters["name"]) for counters in _json(answer)["model_stats"]})

        # The repository's index is behind an admin key.
        return Call("GET", HttpRequest("/v2/models/stats"), _reading(parse))

    def model_metadata(self, model: str, version: str) -> Call[Json]:
        return Call("GET", HttpRequest(model_path(model, version)), _reading(_json))

    def config(self, model: str, version: str) -> Call[Json]:
        return Call("GET", HttpRequest(f"{model_path(model, version)}/config"), _reading(_json))

    def statistics(self, model: str, version: str) -> Call[list[Json]]:
        path = f"{model_path(model, version)}/stats" if model else "/v2/models/stats"
        return Call("GET", HttpRequest(path), _reading(lambda answer: list(_json(answer)["model_stats"])))

    def infer(self, request: InferRequest) -> Call[Arrays]:
        shared = {name: place for name, place in (request.outputs or {}).items() if place is not None}
        path = f"{model_path(request.model, request.version)}/infer"

        def parse(answer: HttpAnswer) -> Arrays:
            return _arrays(answer, shared)

        return Call("POST", _infer_body(path, request), _reading(parse), repeatable=False)

    def register_region(self, name: str, key: str, byte_size: int) -> Call[None]:
        body = json.dumps({"key": key, "offset": 0, "byte_size": byte_size}).encode()
        return Call("POST", HttpRequest(f"{_region_path(name)}/register", body), _nothing)

    def unregister_region(self, name: str) -> Call[None]:
        return Call("POST", HttpRequest(f"{_region_path(name)}/unregister"), _nothing)


def _infer_body(path: str, request: InferRequest) -> HttpRequest:
    """Header in JSON, then the contents of the inputs one after the other."""
    contents, inputs = [], []
    for tensor in request.inputs:
        if isinstance(tensor.data, bytes):
            contents.append(tensor.data)
            parameters: Json = {"binary_data_size": len(tensor.data)}
        else:
            parameters = _region_parameters(tensor.data)
        inputs.append(
            {
                "name": tensor.name,
                "datatype": tensor.datatype,
                "shape": list(tensor.shape),
                "parameters": parameters,
            }
        )
    header: Json = {"inputs": inputs, "parameters": {"binary_data_output": True}}
    if request.request_id:
        header["id"] = request.request_id
    if request.timeout_us is not None:
        header["parameters"]["timeout"] = request.timeout_us
    if request.outputs is not None:
        header["outputs"] = [
            {"name": name, "parameters": {"binary_data": True} if place is None else _region_parameters(place)}
            for name, place in request.outputs.items()
        ]
    text = json.dumps(header).encode()
    headers = {"Content-Type": "application/octet-stream", HEADER_LENGTH: str(len(text))}
    return HttpRequest(path, b"".join([text, *contents]), headers)


def _region_parameters(place: SharedTensor) -> Json:
    return {
        "shared_memory_region": place.region,
        "shared_memory_byte_size": place.byte_size,
        "shared_memory_offset": place.offset,
    }


def _arrays(answer: HttpAnswer, shared: Mapping[str, SharedTensor]) -> Arrays:
    length = len(answer.body) if answer.header_length is None else answer.header_length
    outputs = json.loads(answer.body[:length])["outputs"]
    arrays: Arrays = {}
    at = length
    rest = memoryview(answer.body)
    for output in outputs:
        name, shape = output["name"], tuple(output["shape"])
        if name in shared:
            arrays[name] = shared[name].view(shape)
            continue
        size = int(output["parameters"]["binary_data_size"])
        arrays[name] = decode_array(rest[at : at + size], output["datatype"], shape)
        at += size
    return arrays


def status_error(status: int, reason: str, body: bytes) -> ServerError:
    """The error of a status that is not 200; Triton's `{"error": ...}`, or what a proxy in front of it said."""
    try:
        text = str(json.loads(body.removeprefix(b"data:"))["error"])  # a stream's first event may be its error
    except (ValueError, KeyError, TypeError):
        text = body.decode("utf-8", "replace")[:500]
    return server_error(str(status), text or reason)


def timed_out(address: str, timeout_s: float) -> DeadlineExceeded:
    return DeadlineExceeded("DEADLINE_EXCEEDED", f"no answer from {address} in {round(timeout_s, 3):g} s")


def generate_call(request: InferRequest) -> HttpRequest:
    """A request of `generate_stream`, which takes the inputs as plain JSON values."""
    body: Json = {}
    for tensor in request.inputs:
        assert isinstance(tensor.data, bytes)
        values: list[Any]
        if tensor.datatype == "BYTES":
            values = [item.decode("utf-8") for item in decode_items(tensor.data)]
        else:
            values = decode_array(tensor.data, tensor.datatype, tensor.shape).tolist()
        body[tensor.name] = values[0] if tensor.shape == (1,) else values
    if request.request_id:
        body["id"] = request.request_id
    path = f"{model_path(request.model, request.version)}/generate_stream"
    return HttpRequest(path, json.dumps(body).encode(), {"Content-Type": "application/json"})


def read_event(line: bytes) -> GetOutput | None:
    """The outputs of one line of server-sent events; None where it holds none.

    Raises:
        ServerError: the event is an error.
        ValueError: it is no JSON object.
    """
    if not line.startswith(b"data:"):
        return None
    event = json.loads(line[5:])
    if not isinstance(event, dict):
        raise ValueError(f"the event is no JSON object: {line[:80]!r}")
    if "error" in event:
        raise server_error("ERROR", str(event["error"]))

    def get(name: str) -> list[Any] | None:
        value = event.get(name)
        return value if value is None or isinstance(value, list) else [value]

    return get


def model_path(model: str, version: str) -> str:
    check_names(model, version)
    path = f"/v2/models/{quote(model, safe='')}"
    return f"{path}/versions/{quote(version, safe='')}" if version else path


def _region_path(name: str) -> str:
    return f"/v2/systemsharedmemory/region/{quote(name, safe='')}"


def _reading(parse: Callable[[HttpAnswer], Answer]) -> Callable[[HttpAnswer], Answer]:
    """`parse`, for which a body that was cut, or is not Triton's, is an error of the answer and not of its JSON."""

    def read(answer: HttpAnswer) -> Answer:
        try:
            return parse(answer)
        except (ValueError, KeyError, TypeError) as error:
            shown = f"{len(answer.body)} bytes, {answer.body[:80]!r}"
            raise ServerError("200", f"the answer is cut, or not one of Triton's: {shown}") from error

    return read


def _json(answer: HttpAnswer) -> Json:
    found: Json = json.loads(answer.body)
    return found


def _nothing(answer: HttpAnswer) -> None:
    return None
