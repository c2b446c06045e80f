"""What is sent: inputs for a model, from a generator or a file, serialised once before the first request."""

from __future__ import annotations

import json
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from clients.errors import InputError
from clients.tensors import encode_array
from clients.types import DYNAMIC, NUMPY_DTYPES, ModelMetadata, TensorMetadata, check_inputs
from perf.errors import UsageError

Inputs = dict[str, npt.NDArray[Any]]
GENERATORS = ("random", "zero")
DISTINCT_PAYLOADS = 16  # a server that caches or predicts must not see one request only


@dataclass(frozen=True)
class Workload:
    """Requests ready to be written to a socket.

    Attributes:
        payloads: sent in turn.
        batch_size: inferences in each request.
        description: what a report says of it.
    """

    payloads: tuple[bytes, ...]
    batch_size: int
    description: str


@dataclass(frozen=True)
class GeneratorOptions:
    """How inputs are made up. `shapes` fixes dynamic dimensions, without the batch: {"IDS": (128,)}."""

    kind: str = "random"
    shapes: Mapping[str, tuple[int, ...]] | None = None
    string_data: str | None = None
    string_length: int = 128
    seed: int = 0


def generate_samples(metadata: ModelMetadata, options: GeneratorOptions, count: int) -> list[Inputs]:
    """`count` samples for the inputs that the model needs, each without a batch dimension.

    Random integers are 0 or 1: of all values only these are at once a token id, a mask and a token type.
    Random floats are in [0, 1). Whoever needs more has a file of real inputs.

    Raises:
        UsageError: a dynamic dimension without a shape, or a shape that does not fit.
    """
    shapes = options.shapes or {}
    for name in shapes:
        metadata.find_input(name)
    needed = [tensor for tensor in metadata.inputs if not tensor.optional or tensor.name in shapes]
    fixed = {tensor.name: sample_shape(metadata, tensor, shapes.get(tensor.name)) for tensor in needed}
    random = np.random.default_rng(options.seed)
    return [
        {tensor.name: _generate(tensor, fixed[tensor.name], options, random) for tensor in needed} for _ in range(count)
    ]


def sample_shape(metadata: ModelMetadata, tensor: TensorMetadata, given: tuple[int, ...] | None) -> tuple[int, ...]:
    """The shape of one sample of `tensor`, without the batch dimension."""
    declared = tensor.shape[1:] if metadata.max_batch_size else tensor.shape
    if given is None:
        if DYNAMIC in declared:
            sizes = ",".join("1" if size == DYNAMIC else str(size) for size in declared)
            raise UsageError(
                f"input {tensor.name!r} has dynamic dimensions {list(declared)}; "
                f"fix them with --shape {tensor.name}:{sizes} (without the batch), or send --input-data FILE"
            )
        return declared
    fits = len(given) == len(declared) and all(
        size >= 0 and want in (DYNAMIC, size) for size, want in zip(given, declared, strict=True)
    )
    if not fits:
        raise UsageError(
            f"--shape {tensor.name}:{','.join(map(str, given))} does not fit {list(declared)} "
            "(without the batch; -1 may be any size)"
        )
    return given


def _generate(
    tensor: TensorMetadata, shape: tuple[int, ...], options: GeneratorOptions, random: np.random.Generator
) -> npt.NDArray[Any]:
    dtype = NUMPY_DTYPES.get(tensor.datatype)
    if dtype is None:
        raise UsageError(f"input {tensor.name!r} has the datatype {tensor.datatype!r}, which cannot be made up")
    if tensor.datatype == "BYTES":
        return _generate_strings(shape, options, random)
    if options.kind == "zero":
        return np.zeros(shape, dtype)
    if dtype.kind == "f":
        return random.random(shape).astype(dtype)
    return random.integers(0, 2, shape).astype(dtype)


def _generate_strings(
    shape: tuple[int, ...], options: GeneratorOptions, random: np.random.Generator
) -> npt.NDArray[np.object_]:
    strings = np.empty(int(np.prod(shape)), dtype=np.object_)
    letters = list(string.ascii_lowercase + " ")
    for index in range(len(strings)):
        if options.string_data is not None:
            strings[index] = options.string_data.encode()
        elif options.kind == "zero":
            strings[index] = b""
        else:
            strings[index] = "".join(random.choice(letters, options.string_length)).encode()
    return strings.reshape(shape)


def batch_samples(
    metadata: ModelMetadata, samples: Sequence[Mapping[str, npt.NDArray[Any]]], batch_size: int
) -> list[Inputs]:
    """Requests of `batch_size` samples each; the samples go round when they do not come out even.

    Every sample is in some request. Each request is checked against the model.

    Raises:
        UsageError: the batch is larger than the model takes, or samples that would share one differ in shape.
    """
    if metadata.max_batch_size == 0:
        if batch_size != 1:
            raise UsageError(f"batch size is {batch_size}; model {metadata.name!r} does not batch: only 1 is allowed")
        return [_checked(metadata, sample) for sample in samples]
    if not 1 <= batch_size <= metadata.max_batch_size:
        raise UsageError(f"batch size is {batch_size}; model {metadata.name!r} takes 1 to {metadata.max_batch_size}")
    requests = []
    for first in range(0, len(samples), batch_size):
        members = [samples[(first + offset) % len(samples)] for offset in range(batch_size)]
        requests.append(_checked(metadata, {name: _stack(name, members) for name in members[0]}))
    return requests


def _stack(name: str, members: Sequence[Mapping[str, npt.NDArray[Any]]]) -> npt.NDArray[Any]:
    shapes = {member[name].shape if name in member else None for member in members}
    if len(shapes) > 1:
        raise UsageError(
            f"input {name!r} has the shapes {sorted(map(str, shapes))} in samples that would share a batch; "
            "send samples of one shape, or use a batch size of 1"
        )
    return np.stack([member[name] for member in members])


def _checked(metadata: ModelMetadata, inputs: Mapping[str, npt.NDArray[Any]]) -> Inputs:
    try:
        return check_inputs(metadata, inputs)
    except InputError as error:
        raise UsageError(str(error)) from error


def serialise(
    metadata: ModelMetadata, requests: Sequence[Inputs], protocol: str, address: str, version: str = ""
) -> tuple[bytes, ...]:
    """The requests as bytes: `ModelInferRequest`s for gRPC, whole HTTP requests for HTTP."""
    datatypes = {tensor.name: tensor.datatype for tensor in metadata.inputs}
    if protocol == "grpc":
        return tuple(_grpc_payload(metadata.name, version, inputs, datatypes) for inputs in requests)
    return tuple(_http_payload(metadata.name, version, address, inputs, datatypes) for inputs in requests)


def _grpc_payload(model: str, version: str, inputs: Inputs, datatypes: Mapping[str, str]) -> bytes:
    from tritonclient.grpc import service_pb2

    request = service_pb2.ModelInferRequest(model_name=model, model_version=version)
    for name, array in inputs.items():
        request.inputs.add(name=name, datatype=datatypes[name], shape=array.shape)
        request.raw_input_contents.append(encode_array(array, datatypes[name]))
    return bytes(request.SerializeToString())


def _http_payload(model: str, version: str, address: str, inputs: Inputs, datatypes: Mapping[str, str]) -> bytes:
    contents = {name: encode_array(array, datatypes[name]) for name, array in inputs.items()}
    described = [
        {
            "name": name,
            "shape": list(array.shape),
            "datatype": datatypes[name],
            "parameters": {"binary_data_size": len(contents[name])},
        }
        for name, array in inputs.items()
    ]
    # Outputs in binary, too: a server that prints floats as JSON measures its printing.
    header = json.dumps({"inputs": described, "parameters": {"binary_data_output": True}}).encode()
    body = header + b"".join(contents.values())
    path = f"/v2/models/{model}" + (f"/versions/{version}" if version else "") + "/infer"
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/octet-stream\r\n"
        f"Inference-Header-Content-Length: {len(header)}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode("ascii") + body
