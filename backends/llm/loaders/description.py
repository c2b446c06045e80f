"""A model's configuration without its weights: enough to answer questions about its size."""

from __future__ import annotations

from pathlib import Path

from backends.llm.loaders.base import no_model
from backends.llm.loaders.huggingface_config import config_from_huggingface
from backends.llm.models.config import DecoderConfig
from compiler.sources.huggingface_folder import CONFIG, read_json


def read_description(path: Path) -> tuple[DecoderConfig, int | None]:
    """Returns the configuration, and the bytes of the weight files where there are any.

    Args:
        path: a GGUF file, a Hugging Face folder, or a config.json alone, of a quantised model too.

    Raises:
        ModelRefused: no such file, or a model that is not supported.
    """
    if path.suffix == ".gguf":
        from backends.llm.loaders.gguf_config import config_from_gguf
        from backends.llm.loaders.gguf_file import open_gguf

        file = open_gguf(path)
        return config_from_gguf(file), sum(tensor.nbytes for tensor in file.tensors.values())
    if path.is_dir():
        sizes = [p.stat().st_size for p in path.glob("*.safetensors")]
        return _config(path / CONFIG, f"{path.name}/{CONFIG}"), sum(sizes) or None
    if path.suffix == ".json":
        return _config(path, path.name), None
    raise no_model(path, "a .gguf file, a Hugging Face folder, a config.json")


def _config(path: Path, shown: str) -> DecoderConfig:
    found = path.resolve()  # a cache of the hub holds links, and nothing but this file is read
    return config_from_huggingface(read_json(found.parent, found.name, found.parent.name), shown)
