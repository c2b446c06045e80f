"""A Hugging Face folder as a LoadedModel: safetensors, whole or in shards; no pickles, no code, nothing quantised."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from backends.llm.loaders.base import DenseWeight, LoadedModel, Weight
from backends.llm.loaders.huggingface_config import config_from_huggingface
from backends.llm.loaders.lazy import LazyMapping
from backends.llm.loaders.safetensors_file import SafetensorsFile, StoredTensor, open_safetensors
from backends.llm.loaders.shapes import EMBEDDING, HEAD, check_weights, expected_shapes
from compiler.errors import ModelRefused
from compiler.files import file_sha256
from compiler.sources.huggingface_folder import CONFIG, read_model_folder, tensor_places

# Tables that old checkpoints carry and that follow from the config.
_DERIVED = ".rotary_emb.inv_freq"
# Of a Gemma 3 that also sees images: what its language model's weights are called, before and since transformers 5,
# and the parts that text alone does not need.
_RENAMED = {"language_model.model.": "model.", "language_model.lm_head.": "lm_head.", "model.language_model.": "model."}
_OF_IMAGES = tuple(f"{p}{part}." for p in ("", "model.") for part in ("vision_tower", "multi_modal_projector"))


def load_folder(path: Path) -> LoadedModel:
    """Opens a folder; weights are read when they are asked for.

    Raises:
        ModelRefused: the folder is damaged, holds pickles, code or quantised weights, its model is not supported, or
            its tensors are not the model's.
    """
    shown = path.name
    folder = read_model_folder(path, shown)
    if folder.is_pickle:
        raise ModelRefused(
            f"{shown} has pickled weights only ({folder.weights[0]})", hint="convert them to safetensors"
        )
    config = config_from_huggingface(folder.config, f"{shown}/{CONFIG}")
    files = {name: open_safetensors(path / name, f"{shown}/{name}") for name in folder.weights}
    places = tensor_places(folder, {name: file.tensors for name, file in files.items()}, shown)
    stored = {
        _own_name(t): files[name].tensors[t]
        for t, name in places.items()
        if not t.endswith(_DERIVED) and not t.startswith(_OF_IMAGES)
    }
    readers: dict[str, Callable[[], Weight]] = {
        name: partial(_read, files[places[tensor.name]], tensor.name) for name, tensor in stored.items()
    }
    if config.tie_word_embeddings and HEAD in stored:
        _check_tied(readers, shown)
        del stored[HEAD], readers[HEAD]
    check_weights(shown, expected_shapes(config), {name: tensor.shape for name, tensor in stored.items()})
    return LoadedModel(
        config=config,
        weights=LazyMapping(readers),
        quantization=_main_type(stored),
        source=LazyMapping({name: partial(file_sha256, path / name) for name in folder.files}),
    )


def _bytes(weight: Weight) -> bytes:
    assert isinstance(weight, DenseWeight)
    return weight.array.tobytes()


def _read(file: SafetensorsFile, name: str) -> Weight:
    return DenseWeight(file.read(name))


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


def _main_type(stored: Mapping[str, StoredTensor]) -> str:
    """Returns the type of most matrices."""
    return Counter(t.dtype for t in stored.values() if len(t.shape) > 1).most_common(1)[0][0]
