"""What a model takes and gives, and whether a request fits it. Pure: opens no connection."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from clients.errors import InputError

Value = TypeVar("Value")

DYNAMIC = -1  # a dimension that the request chooses

# Triton's datatype -> the numpy dtype of its arrays. numpy has no bfloat16: float32 goes in and comes out.
NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype(np.uint8),
    "UINT16": np.dtype(np.uint16),
    "UINT32": np.dtype(np.uint32),
    "UINT64": np.dtype(np.uint64),
    "INT8": np.dtype(np.int8),
    "INT16": np.dtype(np.int16),
    "INT32": np.dtype(np.int32),
    "INT64": np.dtype(np.int64),
    "FP16": np.dtype(np.float16),
    "BF16": np.dtype(np.float32),
    "FP32": np.dtype(np.float32),
    "FP64": np.dtype(np.float64),
    "BYTES": np.dtype(np.object_),
}


@dataclass(frozen=True)
class TensorMetadata:
    """One input or output, as the server describes it.

    Attributes:
        name: tensor name.
        datatype: Triton's name: "FP32", "BYTES", ...
        shape: with the batch dimension first when the model batches; -1 is a dynamic dimension.
        optional: a request may leave it out. Only the model's config says so, never the metadata.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    optional: bool = False

    def __str__(self) -> str:
        return f"{self.name} ({self.datatype} {list(self.shape)}{', optional' if self.optional else ''})"


@dataclass(frozen=True)
class ModelMetadata:
    """A model, as the server describes it. `max_batch_size` is 0 when the model does not batch."""

    name: str
    versions: tuple[str, ...]
    inputs: tuple[TensorMetadata, ...]
    outputs: tuple[TensorMetadata, ...]
    max_batch_size: int = 0

    def find_input(self, name: str) -> TensorMetadata:
        """The input called `name`; raises `InputError` with the valid names."""
        for tensor in self.inputs:
            if tensor.name == name:
                return tensor
        valid = ", ".join(map(str, self.inputs))
        raise InputError(f"model {self.name!r} has no input {name!r}; valid inputs: {valid}")


def metadata_from_json(answer: Mapping[str, Any], config: Mapping[str, Any]) -> ModelMetadata:
    """`ModelMetadata` from the server's two answers, in the JSON form of either protocol."""
    optional = {tensor["name"] for tensor in config.get("input", []) if tensor.get("optional")}

    def tensors(key: str) -> tuple[TensorMetadata, ...]:
        return tuple(
            TensorMetadata(
                name=tensor["name"],
                datatype=tensor["datatype"],
                shape=tuple(int(size) for size in tensor.get("shape", ())),  # gRPC's JSON has strings
                optional=key == "inputs" and tensor["name"] in optional,
            )
            for tensor in answer.get(key, [])
        )

    return ModelMetadata(
        name=answer["name"],
        versions=tuple(answer.get("versions", ())),
        inputs=tensors("inputs"),
        outputs=tensors("outputs"),
        max_batch_size=int(config.get("max_batch_size", 0)),
    )


def check_inputs(metadata: ModelMetadata, inputs: Mapping[str, npt.ArrayLike]) -> dict[str, npt.NDArray[Any]]:
    """Turn `inputs` into arrays that the model accepts.

    Arrays must have the exact dtype; Python lists and scalars are converted when no value changes.
    BYTES takes str and bytes and gives an object array of bytes.

    Returns:
        Arrays in the model's order of inputs.

    Raises:
        InputError: names the input, the value seen, and what is allowed.
    """
    arrays: dict[str, npt.NDArray[Any]] = {}
    for tensor, value in given_inputs(metadata, inputs):
        arrays[tensor.name] = convert_value(tensor, value)
        check_shape(tensor, arrays[tensor.name].shape)
    check_batch(metadata, {name: array.shape for name, array in arrays.items()})
    return arrays


def given_inputs(metadata: ModelMetadata, inputs: Mapping[str, Value]) -> list[tuple[TensorMetadata, Value]]:
    """The given inputs in the model's order; raises `InputError` where one is unknown or one that is needed lacks."""
    for name in inputs:
        metadata.find_input(name)
    for tensor in metadata.inputs:
        if tensor.name not in inputs and not tensor.optional:
            given = ", ".join(map(repr, inputs)) or "none"
            raise InputError(f"model {metadata.name!r} needs input {tensor}; given: {given}")
    return [(tensor, inputs[tensor.name]) for tensor in metadata.inputs if tensor.name in inputs]


def check_outputs(metadata: ModelMetadata, outputs: Sequence[str]) -> None:
    """Raise `InputError` when `outputs` names one that the model does not have."""
    valid = [tensor.name for tensor in metadata.outputs]
    for name in outputs:
        if name not in valid:
            allowed = ", ".join(valid)
            raise InputError(f"model {metadata.name!r} has no output {name!r}; valid outputs: {allowed}")


def convert_value(tensor: TensorMetadata, value: npt.ArrayLike) -> npt.NDArray[Any]:
    """`value` as an array of the dtype of `tensor`; raises `InputError` where that would change a value."""
    wanted = NUMPY_DTYPES.get(tensor.datatype)
    if wanted is None:
        raise InputError(
            f"input {tensor.name!r} has the datatype {tensor.datatype!r}, which this client does not know; "
            f"known: {', '.join(NUMPY_DTYPES)}"
        )
    if tensor.datatype == "BYTES":
        return _bytes_array(tensor, value)
    if isinstance(value, (np.ndarray, np.generic)):
        if value.dtype != wanted:
            raise InputError(
                f"input {tensor.name!r} wants numpy {wanted} ({tensor.datatype}), not {value.dtype}; "
                f"convert it with .astype(np.{wanted.type.__name__})"
            )
        return np.asarray(value)
    return _array_from_python(tensor, value, wanted)


def _array_from_python(tensor: TensorMetadata, value: npt.ArrayLike, wanted: np.dtype[Any]) -> npt.NDArray[Any]:
    try:
        natural = np.asarray(value)
    except ValueError as error:
        raise InputError(f"input {tensor.name!r} is not rectangular: {error}") from error
    except (TypeError, RuntimeError) as error:  # of a torch tensor, say, that needs a gradient
        raise InputError(f"input {tensor.name!r} is no array, {type(value).__name__}: {error}") from error
    if natural.size == 0:
        return natural.astype(wanted)
    if wanted.kind in "iu" and natural.dtype.kind in "fO":
        # Python's integers may be: numpy makes floats of 2**63 beside 1, and objects of 2**64.
        exact = np.asarray(value, np.object_)
        if all(isinstance(item, int) for item in exact.ravel().tolist()):
            return _whole_numbers(tensor, exact, wanted)
    # Python's integers are signed; an unsigned target takes them where the values fit.
    unsigned = natural.dtype.kind == "i" and wanted.kind == "u"
    if natural.dtype == np.object_ or not (unsigned or np.can_cast(natural.dtype, wanted, "same_kind")):
        raise InputError(f"input {tensor.name!r} wants {tensor.datatype} values (numpy {wanted}), not {natural.dtype}")
    if wanted.kind in "iu":
        return _whole_numbers(tensor, natural, wanted)
    with np.errstate(over="ignore"):  # an error of our own, not numpy's warning
        converted = natural.astype(wanted)
    if wanted.kind == "f" and (overflown := np.isinf(converted) & np.isfinite(natural)).any():
        raise InputError(
            f"input {tensor.name!r} holds {natural[overflown].flat[0]}; "
            f"{tensor.datatype} allows finite values up to {np.finfo(wanted).max:g}"
        )
    return converted


def _whole_numbers(tensor: TensorMetadata, natural: npt.NDArray[Any], wanted: np.dtype[Any]) -> npt.NDArray[Any]:
    limits = np.iinfo(wanted)
    if natural.min() < limits.min or natural.max() > limits.max:
        raise InputError(
            f"input {tensor.name!r} holds values from {natural.min()} to {natural.max()}; "
            f"{tensor.datatype} allows {limits.min} to {limits.max}"
        )
    return natural.astype(wanted)


def _bytes_array(tensor: TensorMetadata, value: npt.ArrayLike) -> npt.NDArray[np.object_]:
    """An object array of bytes. numpy's own 'S' strips trailing zero bytes, so it is never used."""
    if isinstance(value, (np.ndarray, np.generic)):
        array = np.asarray(value)
        if array.dtype.kind == "S":
            raise InputError(
                f"input {tensor.name!r} is a numpy 'S' array ({array.dtype}), which has already lost "
                "trailing zero bytes; pass a list of bytes, or an array with dtype=object"
            )
        if array.dtype.kind not in "OU":
            raise InputError(f"input {tensor.name!r} wants str or bytes (BYTES), not numpy {array.dtype}")
        shape, items = array.shape, array.ravel().tolist()
    else:
        shape, items = _flatten(tensor, value)
    result = np.empty(len(items), dtype=np.object_)
    for index, item in enumerate(items):
        if isinstance(item, str):
            try:
                result[index] = item.encode("utf-8")
            except UnicodeEncodeError as error:
                raise InputError(f"element {index} of input {tensor.name!r} is no Unicode text: {error}") from error
        elif isinstance(item, (bytes, bytearray)):
            result[index] = bytes(item)
        else:
            raise InputError(
                f"input {tensor.name!r} wants str or bytes (BYTES); element {index} is {item!r:.60} "
                f"of type {type(item).__name__}"
            )
    return result.reshape(shape)


def _flatten(tensor: TensorMetadata, value: Any) -> tuple[tuple[int, ...], list[Any]]:
    """Shape and items of nested lists, without numpy: np.array([b"a\\0"]) would already lose the zero."""
    if not isinstance(value, (list, tuple)):
        return (), [value]
    parts = [_flatten(tensor, item) for item in value]
    shapes = {shape for shape, _ in parts}
    if len(shapes) > 1:
        raise InputError(f"input {tensor.name!r} is not rectangular: its parts have shapes {sorted(shapes)}")
    inner = shapes.pop() if shapes else ()
    return (len(value), *inner), [item for _, items in parts for item in items]


def check_shape(tensor: TensorMetadata, shape: tuple[int, ...]) -> None:
    """Raise `InputError` when `shape` has another rank, or another size where the model fixes one."""
    wanted = list(tensor.shape)
    if len(shape) != len(wanted):
        hint = " (the first dimension is the batch)" if len(shape) + 1 == len(wanted) else ""
        raise InputError(
            f"input {tensor.name!r} has rank {len(shape)} (shape {list(shape)}); "
            f"the model wants rank {len(wanted)}: {wanted}{hint}"
        )
    for axis, (size, allowed) in enumerate(zip(shape, wanted, strict=True)):
        if allowed not in (DYNAMIC, size):
            raise InputError(
                f"input {tensor.name!r} has {size} in dimension {axis} (shape {list(shape)}); "
                f"the model wants {allowed}: {wanted}"
            )


def check_batch(metadata: ModelMetadata, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise `InputError` when the inputs differ in batch size, or it is more than the model takes."""
    if metadata.max_batch_size == 0 or not shapes:
        return
    sizes = {name: shape[0] for name, shape in shapes.items()}
    if len(set(sizes.values())) > 1:
        raise InputError(f"the inputs differ in batch size: {sizes}; all must have the same first dimension")
    batch = next(iter(sizes.values()))
    if not 1 <= batch <= metadata.max_batch_size:
        raise InputError(
            f"batch size {batch} is not allowed; model {metadata.name!r} takes 1 to {metadata.max_batch_size}"
        )
