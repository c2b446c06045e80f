"""One request as bytes: a `ModelInferRequest` for Triton's gRPC stream, or an HTTP request for the OpenAI API."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from clients.tensors import encode_array
from perf.llm.prompts import LlmRequest

# Asked for where the model has it: how many tokens each response holds. All else comes with the end, in ours;
# Triton's vLLM backend says the tokens of the prompt with each response, too.
_OWN_COUNT = "return_num_output_tokens"
_END = "return_usage"
_ELSE = "return_num_input_tokens"


@dataclass(frozen=True)
class Asking:
    """What all requests of a run have in common.

    Attributes:
        stream: tokens as they come, or the whole answer at once.
        ignore_eos: answers of exactly the length asked for.
        inputs: names of the model's inputs; of gRPC only.
        address: `host:port`; of HTTP only, as the following.
        chat: messages and not a prompt.
        api_key: None sends none.
        salt: of the server's prefix cache, where it has one: requests with the same salt share it. "" sends none.
    """

    model: str
    version: str = ""
    stream: bool = True
    ignore_eos: bool = True
    inputs: frozenset[str] = frozenset()
    address: str = ""
    chat: bool = False
    api_key: str | None = None
    salt: str = ""


def grpc_payload(request: LlmRequest, asking: Asking) -> bytes:
    """The message that begins, and ends, the client's side of a stream."""
    from tritonclient.grpc import service_pb2

    # As JSON, which every backend of this kind reads; typed inputs are ours alone.
    sampling = json.dumps({"max_tokens": request.max_tokens, "temperature": 0, "ignore_eos": asking.ignore_eos})
    tensors: dict[str, tuple[str, Any]] = {
        "stream": ("BOOL", np.array([asking.stream])),
        "sampling_parameters": ("BYTES", np.array([sampling.encode()], dtype=object)),
    }
    if isinstance(request.prompt, str):
        tensors["text_input"] = "BYTES", np.array([request.prompt.encode()], dtype=object)
    else:
        tensors["input_ids"] = "INT32", np.array(request.prompt, dtype=np.int32)
    for name in ("exclude_input_in_output", _OWN_COUNT, _END if _END in asking.inputs else _ELSE):
        if name in asking.inputs:
            tensors[name] = "BOOL", np.array([True])
    if asking.salt and "cache_salt" in asking.inputs:
        tensors["cache_salt"] = "BYTES", np.array([asking.salt.encode()], dtype=object)
    message = service_pb2.ModelInferRequest(model_name=asking.model, model_version=asking.version)
    for name, (datatype, array) in tensors.items():
        message.inputs.add(name=name, datatype=datatype, shape=array.shape)
        message.raw_input_contents.append(encode_array(array, datatype))
    return bytes(message.SerializeToString())


def openai_payload(request: LlmRequest, asking: Asking) -> bytes:
    """A whole HTTP request. Usage with every chunk (vLLM's extension) tells how many tokens each one holds."""
    document: dict[str, Any] = {"model": asking.model, "max_tokens": request.max_tokens, "temperature": 0}
    if asking.chat:
        document["messages"] = [{"role": "user", "content": request.prompt}]
    else:
        document["prompt"] = request.prompt
    if asking.ignore_eos:
        document["ignore_eos"] = True
    if asking.salt:
        document["cache_salt"] = asking.salt  # vLLM's, as ignore_eos
    if asking.stream:
        document |= {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    body = json.dumps(document).encode()
    key = f"Authorization: Bearer {asking.api_key}\r\n" if asking.api_key else ""
    head = (
        f"POST /v1/{'chat/' if asking.chat else ''}completions HTTP/1.1\r\nHost: {asking.address}\r\n{key}"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode("latin-1") + body
