"""A GGUF file as a LoadedModel: names, row order and norms made Hugging Face's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from backends.llm.loaders.base import DenseWeight, LoadedModel, Weight
from backends.llm.loaders.gguf_config import ROPE_FREQS, config_from_gguf, gguf_name
from backends.llm.loaders.gguf_file import GgufFile, TensorInfo, open_gguf
from backends.llm.loaders.gguf_quants import dequantize, weight_from_bytes
from backends.llm.loaders.lazy import LazyMapping
from backends.llm.loaders.shapes import check_weights, expected_shapes
from backends.llm.models.config import DecoderConfig
from compiler.errors import ModelRefused
from compiler.files import file_sha256


def load_gguf(path: Path) -> LoadedModel:
    """Opens a GGUF file; weights are read when they are asked for.

    Raises:
        ModelRefused: the file is damaged, its model is not supported, or its tensors are not the model's.
    """
    file = open_gguf(path)
    config = config_from_gguf(file)
    names = {name: gguf_name(name, config) for name in expected_shapes(config)}
    wanted = {names[name]: shape for name, shape in expected_shapes(config).items()}
    shapes = {info.name: _true_shape(file, info) for info in file.tensors.values()}
    check_weights(file.shown, wanted, {n: s for n, s in shapes.items() if n != ROPE_FREQS})
    readers: dict[str, Callable[[], Weight]] = {
        name: partial(_read, file, config, name, stored, shapes[stored]) for name, stored in names.items()
    }
    return LoadedModel(
        config=config,
        weights=LazyMapping(readers),
        quantization=_main_type(file),
        source=LazyMapping({path.name: partial(file_sha256, path)}),
    )


def _true_shape(file: GgufFile, info: TensorInfo) -> tuple[int, ...]:
    """Returns the shape that the metadata declares for a tensor that was stored in another one (ComfyUI-GGUF)."""
    key = f"comfy.gguf.orig_shape.{info.name}"
    if key not in file.metadata:
        return info.shape
    declared = file.metadata.values[key]
    shape = tuple(int(d) for d in declared) if isinstance(declared, np.ndarray) and declared.dtype.kind in "iu" else ()
    if not shape or min(shape) < 1 or _product(shape) != _product(info.shape):
        raise ModelRefused(
            f"{file.shown}: metadata '{key}' is {list(shape)}; wanted: a shape of as many elements "
            f"as the stored {list(info.shape)}"
        )
    return shape


def _product(dims: tuple[int, ...]) -> int:
    product = 1
    for dim in dims:
        product *= dim
    return product


def _read(file: GgufFile, config: DecoderConfig, name: str, stored: str, shape: tuple[int, ...]) -> Weight:
    info = file.tensors[stored]
    data = file.read(stored)
    if shape != info.shape:  # groups run along the stored rows: none is left in the declared ones
        return DenseWeight(dequantize(data, info.type, info.shape).reshape(shape))
    weight = weight_from_bytes(data, info.type, shape)
    if config.architecture == "llama" and ".self_attn.q_proj." in name:
        return _rows_of_halves(weight, config.num_attention_heads)
    if config.architecture == "llama" and ".self_attn.k_proj." in name:
        return _rows_of_halves(weight, config.num_key_value_heads)
    if config.norm_offset and isinstance(weight, DenseWeight) and name.endswith("norm.weight"):
        # The file has what the norm multiplies with, Hugging Face what is added to 1.
        return DenseWeight(weight.array.astype(np.float32) - np.float32(config.norm_offset))
    return weight


def _rows_of_halves(weight: Weight, heads: int) -> Weight:
    """Undoes the row order of llama.cpp's Llama, in which the two rows of a rotary pair are neighbours.

    file           row 2i of a head = even partner of pair i, row 2i + 1 = odd partner
    Hugging Face   row i            = even partner of pair i, row i + head_dim / 2 = odd partner
    """
    if isinstance(weight, DenseWeight):
        return DenseWeight(_reordered(weight.array, heads))
    return replace(
        weight,
        codes=_reordered(weight.codes, heads),
        scales=_reordered(weight.scales, heads),
        mins=_reordered(weight.mins, heads),
    )


def _reordered(array: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    halves = array.reshape(heads, array.shape[0] // heads // 2, 2, *array.shape[1:]).swapaxes(1, 2)
    return np.ascontiguousarray(halves).reshape(array.shape)


def _main_type(file: GgufFile) -> str:
    """Returns the type of most matrices."""
    counts = Counter(i.type.name for i in file.tensors.values() if len(i.shape) > 1)
    return counts.most_common(1)[0][0]
