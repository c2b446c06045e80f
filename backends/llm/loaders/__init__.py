"""Models from disk, as configuration and weights: GGUF files, Hugging Face folders. No code of a model runs."""

from __future__ import annotations

from pathlib import Path

from backends.llm.loaders.base import DenseWeight, GroupedWeight, LoadedModel, Weight, no_model

__all__ = ["DenseWeight", "GroupedWeight", "LoadedModel", "Weight", "load_model"]


def load_model(path: str | Path) -> LoadedModel:
    """Opens a GGUF file or a Hugging Face folder; weights are read when they are asked for.

    Raises:
        ModelRefused: no such file, or a model that is damaged or not supported.
    """
    path = Path(path)
    if path.is_dir():
        from backends.llm.loaders.huggingface_model import load_folder

        return load_folder(path)
    if path.suffix == ".gguf":
        from backends.llm.loaders.gguf_model import load_gguf

        return load_gguf(path)
    raise no_model(path, "a .gguf file, or a folder with config.json and safetensors")
