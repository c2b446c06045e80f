"""A Hugging Face folder as a LoadedModel: safetensors, whole or in shards, plain or packed by AWQ and GPTQ.

No pickles, no code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from backends.llm.loaders.base import DenseWeight, LoadedModel, Weight
from backends.llm.loaders.huggingface_config import config_from_huggingface
from backends.llm.loaders.lazy import LazyMapping
from backends.llm.loaders.packed_matrices import PARTS, Packing, packed_shape, packing_of, unpack
from backends.llm.loaders.safetensors_file import SafetensorsFile, StoredTensor, open_safetensors
from backends.llm.loaders.shapes import EMBEDDING, HEAD, check_weights, expected_shapes
from backends.llm.models.weights import values
from compiler.errors import ModelRefused
from compiler.files import file_sha256
from compiler.sources.huggingface_folder import CONFIG, ModelFolder, read_model_folder, tensor_places

# Tables that old checkpoints carry and that follow from the config.
_DERIVED = ".rotary_emb.inv_freq"
# Of a Gemma 3 that also sees images: what its language model's weights are called, before and since transformers 5,
# and the parts that text alone does not need.
_RENAMED = {"language_model.model.": "model.", "language_model.lm_head.": "lm_head.", "model.language_model.": "model."}
_OF_IMAGES = tuple(f"{p}{part}." for p in ("", "model.") for part in ("vision_tower", "multi_modal_projector"))
Place = tuple[SafetensorsFile, StoredTensor]


def load_folder(path: Path) -> LoadedModel:
    """Opens a folder; weights are read when they are asked for.

    Raises:
        ModelRefused: the folder is damaged, holds pickles, code or weights quantised in a way that is not known, its
            model is not supported, or its tensors are not the model's.
    """
    shown = path.name
    folder = read_model_folder(path, shown, quantised=True)
    if folder.is_pickle:
        raise ModelRefused(
            f"{shown} has pickled weights only ({folder.weights[0]})", hint="convert them to safetensors"
        )
    packing = packing_of(folder.config, f"{shown}/{CONFIG}")
    config = config_from_huggingface(folder.config, f"{shown}/{CONFIG}")
    wanted = expected_shapes(config)
    stored = _stored(folder, path, shown)
    packed = _taken_apart(stored) if packing else {}
    readers: dict[str, Callable[[], Weight]] = {name: partial(_read, *place) for name, place in stored.items()}
    shapes = {name: tensor.shape for name, (_, tensor) in stored.items()}
    if config.tie_word_embeddings and HEAD in stored:
        _check_tied(readers, shown)
        del readers[HEAD], shapes[HEAD]
    if packing:
        _add_packed(packing, packed, readers, shapes, shown)
        _drop_empty_biases(readers, shapes, wanted)
    check_weights(shown, wanted, shapes)
    return LoadedModel(
        config=config,
        weights=LazyMapping(readers),
        quantization=packing.shown if packing else _main_type([tensor for _, tensor in stored.values()]),
        source=LazyMapping({name: partial(file_sha256, path / name) for name in folder.files}),
    )


def _stored(folder: ModelFolder, path: Path, shown: str) -> dict[str, Place]:
    """Returns the tensors of the language model, by our names."""
    files = {name: open_safetensors(path / name, f"{shown}/{name}") for name in folder.weights}
    places = tensor_places(folder, {name: file.tensors for name, file in files.items()}, shown)
    return {
        _own_name(t): (files[name], files[name].tensors[t])
        for t, name in places.items()
        if not t.endswith(_DERIVED) and not t.startswith(_OF_IMAGES)
    }


def _taken_apart(stored: dict[str, Place]) -> dict[str, dict[str, Place]]:
    """Takes the parts of packed matrices out of `stored`; returns them by the matrix's name."""
    packed: dict[str, dict[str, Place]] = {}
    for name in list(stored):
        matrix, _, part = name.rpartition(".")
        if part in PARTS:
            packed.setdefault(f"{matrix}.weight", {})[part] = stored.pop(name)
    return packed


def _add_packed(
    packing: Packing,
    packed: Mapping[str, Mapping[str, Place]],
    readers: dict[str, Callable[[], Weight]],
    shapes: dict[str, tuple[int, ...]],
    shown: str,
) -> None:
    for name, places in packed.items():
        parts = {part: tensor for part, (_, tensor) in places.items()}
        shapes[name] = packed_shape(packing, parts, f"{shown}: '{name}'")
        readers[name] = partial(_read_packed, packing, places)


def _read_packed(packing: Packing, places: Mapping[str, Place]) -> Weight:
    def read(part: str) -> Any:
        file, tensor = places[part]
        return file.read(tensor.name, PARTS[part])

    return unpack(packing, read, {part: tensor for part, (_, tensor) in places.items()})


def _drop_empty_biases(
    readers: dict[str, Callable[[], Weight]], shapes: dict[str, tuple[int, ...]], wanted: Mapping[str, object]
) -> None:
    """Some packers write a bias of zeros for every matrix; one that says something is left, and refused."""
    for name in [n for n in readers if n.endswith(".bias") and n not in wanted]:
        if not values(readers[name]()).any():
            del readers[name], shapes[name]


def _bytes(weight: Weight) -> bytes:
    assert isinstance(weight, DenseWeight)
    return weight.array.tobytes()


def _read(file: SafetensorsFile, tensor: StoredTensor) -> Weight:
    return DenseWeight(file.read(tensor.name))


def _own_name(stored: str) -> str:
    for prefix, own in _RENAMED.items():
        if stored.startswith(prefix):
            return own + stored.removeprefix(prefix)
    return stored


def _check_tied(readers: Mapping[str, Callable[[], Weight]], shown: str) -> None:
    """Refuses an output matrix of its own where the config says that it is the embedding."""
    head, embedding = (_bytes(readers[name]()) if name in readers else None for name in (HEAD, EMBEDDING))
    if head != embedding:
        raise ModelRefused(
            f"{shown}: the config says tie_word_embeddings, but '{HEAD}' is not '{EMBEDDING}'",
            hint=f"set tie_word_embeddings to false in {CONFIG}, or remove '{HEAD}', whichever the model was made with",
        )


def _main_type(stored: Iterable[StoredTensor]) -> str:
    """Returns the type of most matrices."""
    return Counter(t.dtype for t in stored if len(t.shape) > 1).most_common(1)[0][0]
