"""Reads perf_analyzer's JSON files of input data.

    {"data": [{"INPUT": [1, 2, 3]},
              {"INPUT": {"content": [1, 2, 3, 4], "shape": [2, 2]}},
              {"INPUT": {"b64": "..."}}]}

A list of lists (perf_analyzer's streams) is read as one list.
"""

from __future__ import annotations

import base64
import binascii
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from clients.errors import InputError
from clients.types import NUMPY_DTYPES, ModelMetadata, TensorMetadata, convert_value
from perf.errors import UsageError
from perf.json_form import document_from_json
from perf.workload import Inputs, sample_shape


def read_input_data(path: Path, metadata: ModelMetadata) -> list[Inputs]:
    """The samples in the file, each without a batch dimension.

    Raises:
        UsageError: no such file, not the format, or an entry that does not fit the model; names the entry.
    """
    try:
        text = path.read_text("utf-8")
    except OSError as error:
        raise UsageError(f"cannot read --input-data {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--input-data {path} is not JSON: {error}") from error
    document = document_from_json(text, f"--input-data {path}")
    entries = document.get("data") if isinstance(document, dict) else None
    if not isinstance(entries, list) or not entries:
        raise UsageError(f'--input-data {path} needs a list under "data": {{"data": [{{"INPUT": [1, 2]}}]}}')
    flat = [one for entry in entries for one in (entry if isinstance(entry, list) else [entry])]
    samples = []
    for number, entry in enumerate(flat):
        try:
            samples.append(_sample(metadata, entry))
        except (InputError, UsageError) as error:
            raise UsageError(f"--input-data {path}, entry {number}: {error}") from error
    return samples


def _sample(metadata: ModelMetadata, entry: Any) -> Inputs:
    if not isinstance(entry, dict):
        raise UsageError(f"an entry maps input names to values; this one is {entry!r:.60}")
    inputs: Inputs = {}
    for name, value in entry.items():
        inputs[name] = _value(metadata, metadata.find_input(name), value)
    for tensor in metadata.inputs:
        if tensor.name not in inputs and not tensor.optional:
            raise UsageError(f"input {tensor} is missing; given: {', '.join(map(repr, entry)) or 'none'}")
    return inputs


def _value(metadata: ModelMetadata, tensor: TensorMetadata, value: Any) -> npt.NDArray[Any]:
    shape: tuple[int, ...] | None = None
    if isinstance(value, dict):
        if "shape" in value:
            shape = _shape(tensor, value["shape"])
        if "b64" in value:
            array = _decode(tensor, value["b64"])
        elif "content" in value:
            array = convert_value(tensor, value["content"])
        else:
            raise UsageError(f'input {tensor.name!r} needs "content" or "b64"; it has: {", ".join(value)}')
    else:
        array = convert_value(tensor, value)
    return _reshape(metadata, tensor, array, shape)


def _shape(tensor: TensorMetadata, value: Any) -> tuple[int, ...]:
    sizes = value if isinstance(value, list) else [None]
    if not all(type(size) is int for size in sizes):
        raise UsageError(f"input {tensor.name!r} has the shape {value!r:.60}; it must be a list of whole numbers")
    return tuple(sizes)


def _reshape(
    metadata: ModelMetadata, tensor: TensorMetadata, array: npt.NDArray[Any], shape: tuple[int, ...] | None
) -> npt.NDArray[Any]:
    """Lists are flat in this format: they take the shape given, else the model's, else their own."""
    declared = tensor.shape[1:] if metadata.max_batch_size else tensor.shape
    if shape is None:
        if array.ndim == len(declared):
            shape = array.shape
        elif sum(size == -1 for size in declared) > 1:
            raise UsageError(f'input {tensor.name!r} has dynamic dimensions {list(declared)}; give its "shape"')
        else:
            known = int(np.prod([size for size in declared if size != -1]))
            shape = tuple(array.size // max(known, 1) if size == -1 else size for size in declared)
    wanted = sample_shape(metadata, tensor, shape)
    if int(np.prod(wanted)) != array.size:
        raise UsageError(
            f"input {tensor.name!r} has {array.size} values; the shape {list(wanted)} needs another number"
        )
    return array.reshape(wanted)


def _decode(tensor: TensorMetadata, text: Any) -> npt.NDArray[Any]:
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, TypeError, ValueError) as error:
        raise UsageError(f"input {tensor.name!r} has a b64 that cannot be decoded: {error}") from error
    if tensor.datatype == "BYTES":
        return convert_value(tensor, [raw])
    dtype = NUMPY_DTYPES[tensor.datatype]
    if tensor.datatype == "BF16" or len(raw) % dtype.itemsize:
        raise UsageError(f"input {tensor.name!r} has {len(raw)} bytes in b64, which are no {tensor.datatype} values")
    return np.frombuffer(raw, dtype)
