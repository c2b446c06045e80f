"""Triton's gRPC stream without a client library between: what came, and whether it ended with FINAL."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
import numpy as np
from tritonclient.grpc import service_pb2

STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
_TYPES = {bool: ("BOOL", np.bool_), int: ("INT32", np.int32), float: ("FP32", np.float32)}


@dataclass
class Outcome:
    """What became of one request.

    Attributes:
        tokens: of all its responses.
        error: Triton's text, or the status of gRPC; empty where there was none.
        final: whether a response said that it is the last.
        silent: whether nothing came for so long that it was given up.
        cancel: what became of the request that cancelled it.
    """

    tokens: list[int] = field(default_factory=list)
    responses: int = 0
    finish_reason: str = ""
    error: str = ""
    final: bool = False
    cancelled: bool = False
    silent: bool = False
    cancel: Outcome | None = None


def add_bytes(request: Any, name: str, datatype: str, shape: list[int], content: bytes) -> None:
    """Adds an input as it is."""
    request.inputs.add(name=name, datatype=datatype, shape=shape)
    request.raw_input_contents.append(content)


def text_bytes(text: bytes) -> bytes:
    return len(text).to_bytes(4, "little") + text


def request_message(model: str, inputs: Mapping[str, Any], request_id: str = "") -> Any:
    """Returns a request; texts, truths, numbers and lists of whole numbers are what inputs may be."""
    request = service_pb2.ModelInferRequest(model_name=model, id=request_id)
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    for name, value in inputs.items():
        if isinstance(value, (str, bytes)):
            content = value.encode() if isinstance(value, str) else value
            add_bytes(request, name, "BYTES", [1], text_bytes(content))
        elif isinstance(value, (list, tuple)):
            add_bytes(request, name, "INT32", [len(value)], np.array(value, np.int32).tobytes())
        else:
            datatype, dtype = _TYPES[type(value)]
            add_bytes(request, name, datatype, [1], np.array([value], dtype).tobytes())
    return request


async def ask(
    channel: Any, request: Any, *, patience_s: float, cancel_after: int | None = None, cancel: Any = None
) -> Outcome:
    """Sends one request on a stream of its own and reads to its end.

    Args:
        patience_s: for each response.
        cancel_after: so many responses, with another request.
        cancel: that request; without it the call is cancelled as gRPC does it.
    """
    method = channel.unary_stream(
        STREAM,
        request_serializer=service_pb2.ModelInferRequest.SerializeToString,
        response_deserializer=service_pb2.ModelStreamInferResponse.FromString,
    )
    call = method(request)
    outcome = Outcome()
    try:
        while True:  # to the end that the server makes: it follows upon the final response, and upon an error
            if cancel_after is not None and outcome.responses >= cancel_after and not outcome.cancelled:
                outcome.cancelled = True
                if cancel is None:
                    break
                outcome.cancel = await ask(channel, cancel, patience_s=patience_s)
            message = await asyncio.wait_for(call.read(), patience_s)
            if message is grpc.aio.EOF:
                break
            _take(outcome, message)
    except asyncio.TimeoutError:
        outcome.silent = True
    except grpc.aio.AioRpcError as error:
        outcome.error = f"{error.code().name}: {error.details()}"
    finally:
        call.cancel()
    return outcome


def _take(outcome: Outcome, message: Any) -> None:
    outcome.responses += 1
    outcome.error = message.error_message
    response = message.infer_response
    outcome.final = response.parameters["triton_final_response"].bool_param
    for output, content in zip(response.outputs, response.raw_output_contents, strict=True):
        if output.name == "token_ids":
            outcome.tokens += np.frombuffer(content, np.int32).tolist()
        elif output.name == "finish_reason" and content[4:] != b"None":
            outcome.finish_reason = content[4:].decode()
