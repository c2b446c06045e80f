"""One inference as data, checked and encoded; each protocol writes it down in its own way. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from clients.errors import InputError
from clients.shared_memory import SharedTensor
from clients.tensors import EncodedBytes, encode_array
from clients.types import (
    ModelMetadata,
    TensorMetadata,
    check_batch,
    check_outputs,
    check_shape,
    convert_value,
    given_inputs,
)

InputValue = npt.ArrayLike | EncodedBytes | SharedTensor


@dataclass(frozen=True)
class InputTensor:
    """An input as it is sent: its contents, or where they lie in shared memory."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes | SharedTensor


@dataclass(frozen=True)
class InferRequest:
    """One inference.

    Attributes:
        outputs: None means all; a value says where in shared memory the server writes that output.
        timeout_s: how long the server may work on it; None is without a limit.
        cancel: the request that ends this one, where the model takes such.
    """

    model: str
    version: str
    inputs: tuple[InputTensor, ...]
    outputs: Mapping[str, SharedTensor | None] | None = None
    request_id: str = ""
    timeout_s: float | None = None
    cancel: InferRequest | None = None

    @property
    def timeout_us(self) -> int | None:
        """Triton's own form of the time limit."""
        return None if self.timeout_s is None else max(1, math.ceil(self.timeout_s * 1e6))


Outputs = Sequence[str] | Mapping[str, SharedTensor | None]


def build_request(
    metadata: ModelMetadata,
    inputs: Mapping[str, InputValue],
    outputs: Outputs | None,
    *,
    version: str = "",
    request_id: str = "",
    timeout_s: float | None = None,
) -> InferRequest:
    """Check `inputs` and `outputs` against the model and encode them.

    Raises:
        InputError: names the tensor, the value seen, and what is allowed.
    """
    tensors = tuple(_input_tensor(tensor, value) for tensor, value in given_inputs(metadata, inputs))
    check_batch(metadata, {tensor.name: tensor.shape for tensor in tensors})
    wanted: Mapping[str, SharedTensor | None] | None = None
    if isinstance(outputs, str):
        raise InputError(f"outputs is the text {outputs!r}; give a list of names: [{outputs!r}]")
    try:
        request_id.encode()
    except UnicodeEncodeError as error:
        raise InputError(f"the request_id {request_id!r} is no Unicode text: {error}") from error
    if outputs is not None:
        check_outputs(metadata, list(outputs))
        wanted = outputs if isinstance(outputs, Mapping) else dict.fromkeys(outputs)
        _check_shared_outputs(metadata, wanted)
    return InferRequest(metadata.name, version, tensors, wanted, request_id, timeout_s)


def _input_tensor(tensor: TensorMetadata, value: Any) -> InputTensor:
    if isinstance(value, EncodedBytes):
        if tensor.datatype != "BYTES":
            raise InputError(f"input {tensor.name!r} is {tensor.datatype}; EncodedBytes are for BYTES alone")
        check_shape(tensor, value.shape)
        return InputTensor(tensor.name, tensor.datatype, value.shape, value.data)
    if isinstance(value, SharedTensor):
        if value.datatype != tensor.datatype:
            raise InputError(f"input {tensor.name!r} is {tensor.datatype}, not {value.datatype} as its shared memory")
        check_shape(tensor, value.shape)
        return InputTensor(tensor.name, tensor.datatype, value.shape, value)
    array = convert_value(tensor, value)
    check_shape(tensor, array.shape)
    return InputTensor(tensor.name, tensor.datatype, array.shape, encode_array(array, tensor.datatype))


def _check_shared_outputs(metadata: ModelMetadata, wanted: Mapping[str, SharedTensor | None]) -> None:
    datatypes = {tensor.name: tensor.datatype for tensor in metadata.outputs}
    for name, place in wanted.items():
        if place is not None and place.datatype != datatypes[name]:
            raise InputError(f"output {name!r} is {datatypes[name]}, not {place.datatype} as its shared memory")
