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
    stored = {t: files[name].tensors[t] for t, name in places.items() if not t.endswith(_DERIVED)}
    if config.tie_word_embeddings and HEAD in stored:
        _check_tied(files, places, shown)
        del stored[HEAD]
    wanted = expected_shapes(config)
    check_weights(shown, wanted, {name: tensor.shape for name, tensor in stored.items()})
    readers: dict[str, Callable[[], Weight]] = {name: partial(_read, files[places[name]], name) for name in wanted}
    return LoadedModel(
        config=config,
        weights=LazyMapping(readers),
        quantization=_main_type(stored),
        source=LazyMapping({name: partial(file_sha256, path / name) for name in folder.files}),
    )


def _read(file: SafetensorsFile, name: str) -> Weight:
    return DenseWeight(file.read(name))


def _check_tied(files: Mapping[str, SafetensorsFile], places: Mapping[str, str], shown: str) -> None:
    """Refuses an output matrix of its own where the config says that it is the embedding."""
    head, embedding = (
        files[places[name]].read(name).tobytes() if name in places else None for name in (HEAD, EMBEDDING)
    )
    if head != embedding:
        raise ModelRefused(
            f"{shown}: the config says tie_word_embeddings, but '{HEAD}' is not '{EMBEDDING}'",
            hint=f"set tie_word_embeddings to false in {CONFIG}, or remove '{HEAD}', whichever the model was made with",
        )


def _main_type(stored: Mapping[str, StoredTensor]) -> str:
    """Returns the type of most matrices."""
    return Counter(t.dtype for t in stored.values() if len(t.shape) > 1).most_common(1)[0][0]
