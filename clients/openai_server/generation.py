"""A generation as the backend wants it (docs/serving_llm.md), and its responses as updates."""

from __future__ import annotations

import json
import struct
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tritonclient.grpc import service_pb2

from clients.openai_server.triton import InferRequest, InferResponse, Triton

_LENGTH = struct.Struct("<I")
_COUNTS = ("num_input_tokens", "num_output_tokens", "num_cached_tokens")
GOES_ON = "null"  # the finish reason of an answer that has not ended


@dataclass(frozen=True)
class Generation:
    """One prompt to be answered.

    Attributes:
        sampling: the fields of SamplingParams.
        logprobs: whether the responses carry them; how many stands in `sampling`.
        options: further inputs: `priority`, `client`, `cache_salt`, `deadline_ms`; None is left out.
    """

    model: str
    version: str
    request_id: str
    input_ids: Sequence[int]
    sampling: Mapping[str, Any]
    stream: bool
    logprobs: bool
    options: Mapping[str, Any]

    @property
    def n(self) -> int:
        return int(self.sampling.get("n", 1))


@dataclass(frozen=True, slots=True)
class Update:
    """What a response adds: for each answer its text, its finish reason or "null", and logprobs as JSON.

    Attributes:
        num_prompt_tokens, num_cached_tokens, num_output_tokens: so far; the last of all answers together.
    """

    texts: Sequence[str]
    finish_reasons: Sequence[str]
    logprobs: Sequence[str]
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int


async def generate(triton: Triton, generation: Generation, timeout_s: float) -> AsyncIterator[Update]:
    """Yields what is new until all answers have ended; ending the iteration early cancels the request.

    Raises:
        ApiError: see `Triton.stream`.
    """
    stream = triton.stream(infer_request(generation), timeout_s)
    try:
        async for response in stream:
            if response.outputs:  # the final response may be empty
                yield update_from_response(response)
    finally:
        await stream.aclose()  # type: ignore[attr-defined]


def infer_request(generation: Generation) -> InferRequest:
    """Returns the request in Triton's form."""
    request = service_pb2.ModelInferRequest(
        model_name=generation.model, model_version=generation.version, id=generation.request_id
    )
    ids = np.asarray(generation.input_ids, dtype=np.int32)
    _add(request, "input_ids", "INT32", ids.tobytes(), len(ids))
    _add(request, "stream", "BOOL", bytes([generation.stream]))
    _add(request, "sampling_parameters", "BYTES", _text(json.dumps(generation.sampling)))
    for name in ("exclude_input_in_output", "return_finish_reason", *(f"return_{name}" for name in _COUNTS)):
        _add(request, name, "BOOL", b"\1")
    if generation.logprobs:
        _add(request, "return_logprobs", "BOOL", b"\1")
    for name, value in generation.options.items():
        if isinstance(value, str):
            _add(request, name, "BYTES", _text(value))
        elif isinstance(value, int):
            _add(request, name, "INT32", struct.pack("<i", value))
        elif value is not None:
            _add(request, name, "FP32", struct.pack("<f", value))
    return request


def update_from_response(response: InferResponse) -> Update:
    """Returns what a response says."""
    found = {t.name: raw for t, raw in zip(response.outputs, response.raw_output_contents, strict=True)}
    prompt, output, cached = (_numbers(found.get(name, b"")) for name in _COUNTS)
    texts = texts_from_bytes(found.get("text_output", b""))
    return Update(
        texts=texts,
        finish_reasons=texts_from_bytes(found.get("finish_reason", b"")) or [GOES_ON] * len(texts),
        logprobs=texts_from_bytes(found.get("logprobs", b"")),
        num_prompt_tokens=max(prompt, default=0),
        num_cached_tokens=max(cached, default=0),
        num_output_tokens=sum(output),
    )


def _numbers(raw: bytes) -> tuple[int, ...]:
    """Returns the elements of a UINT32 tensor."""
    return struct.unpack(f"<{len(raw) // 4}I", raw)


def texts_from_bytes(raw: bytes) -> list[str]:
    """Returns the elements of a BYTES tensor: each has its length before it."""
    texts = []
    place = 0
    while place < len(raw):
        end = place + 4 + _LENGTH.unpack_from(raw, place)[0]
        texts.append(raw[place + 4 : end].decode("utf-8", "replace"))
        place = end
    return texts


def _text(value: str) -> bytes:
    data = value.encode()
    return _LENGTH.pack(len(data)) + data


def _add(request: InferRequest, name: str, datatype: str, data: bytes, size: int = 1) -> None:
    request.inputs.add(name=name, datatype=datatype, shape=[size])
    request.raw_input_contents.append(data)
