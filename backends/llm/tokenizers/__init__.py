"""Tokenizers from disk: of GGUF files, of Hugging Face folders."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from backends.llm.loaders.base import no_model
from backends.llm.tokenizers.base import Tokenizer
from compiler.errors import EnvironmentLacks

__all__ = ["Tokenizer", "load_tokenizer"]


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Builds the tokenizer of a GGUF file or a Hugging Face folder.

    Raises:
        ModelRefused: no such file, or a tokenizer that is damaged or not supported.
        EnvironmentLacks: the library `tokenizers` is not installed.
    """
    path = Path(path)
    if importlib.util.find_spec("tokenizers") is None:
        raise EnvironmentLacks("the package tokenizers is not installed", hint="pip install 'modelkiln[llm]'")
    if path.is_dir():
        from backends.llm.tokenizers.folder_tokenizer import load_folder_tokenizer

        return load_folder_tokenizer(path)
    if path.suffix == ".gguf":
        from backends.llm.tokenizers.gguf_tokenizer import load_gguf_tokenizer

        return load_gguf_tokenizer(path)
    raise no_model(path, "a .gguf file, or a folder with tokenizer.json")
