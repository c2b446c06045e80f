"""The files of a Hugging Face folder: which are read, which are refused. No torch and no transformers here."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compiler.errors import ModelRefused, one_of
from compiler.files import resolve_folder
from compiler.source_spec import HuggingFaceSource
from compiler.spec import ModelSpec

CONFIG = "config.json"
# The two families of weight files: what one file, the index and a shard are called.
SAFETENSORS = ("model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors")
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-*-of-*.bin")
MAX_JSON_BYTES = 64 << 20


@dataclass(frozen=True)
class ModelFolder:
    """A folder's files that are read, all of them plain files inside it.

    Attributes:
        config: the content of `config.json`, which holds no code and names none.
        weights: the weight files, shards in order.
        index: the index of the shards, or None.
        is_pickle: whether the weights are pickles.
        named: the file that the index gives for each tensor; it may lack some.
    """

    path: Path
    config: dict[str, Any]
    weights: tuple[str, ...]
    index: str | None
    is_pickle: bool
    named: dict[str, str]

    @property
    def files(self) -> tuple[str, ...]:
        return (CONFIG, *((self.index,) if self.index else ()), *self.weights)


def folder_files(spec: ModelSpec, source: HuggingFaceSource) -> dict[str, Path]:
    """Returns every file of the folder that a build reads, by the folder's name in the spec and its own."""
    folder = read_folder(spec, source)
    return {f"{source.huggingface}/{name}": folder.path / name for name in folder.files}


def read_folder(spec: ModelSpec, source: HuggingFaceSource) -> ModelFolder:
    """Reads `config.json` and finds the weight files.

    Raises:
        SpecError: no such folder.
        ModelRefused: a file is missing, is a link, names code to run, or lies outside the folder.
    """
    path = resolve_folder(spec.at("source", "huggingface"), source.huggingface, spec.path.parent)
    return read_model_folder(path, source.huggingface)


def read_model_folder(path: Path, shown: str, *, quantised: bool = False) -> ModelFolder:
    """Reads `config.json` of a folder and finds its weight files, as `read_folder` does.

    Args:
        shown: how errors name the folder.
        quantised: take a config with 'quantization_config' too; the caller knows its tensors.
    """
    config = read_config(path, shown, quantised=quantised)
    for one, index, pattern in (SAFETENSORS, PICKLES):
        names, named, has_index = _weight_files(path, one, index, pattern, shown)
        if names:
            return ModelFolder(path, config, names, index if has_index else None, one == PICKLES[0], named)
    found = sorted(p.name for p in path.iterdir() if not p.name.startswith("."))
    raise ModelRefused(
        f"{shown} holds no weights: {SAFETENSORS[0]}, or shards with {SAFETENSORS[1]}; it holds: {one_of(found)}"
    )


def read_config(path: Path, shown: str, *, quantised: bool = False) -> dict[str, Any]:
    """Returns the content of a folder's `config.json`, which names no code, and quantisation only where it may."""
    config = read_json(path, CONFIG, shown)
    _refuse_code(config, shown)
    if not quantised:
        _refuse_quantised(config, shown)
    return config


def tensor_places(folder: ModelFolder, names: Mapping[str, Iterable[str]], shown: str) -> dict[str, str]:
    """Returns the file of each tensor: what the files hold counts, not what the index lists.

    Args:
        names: the tensors that each weight file holds.

    Raises:
        ModelRefused: a tensor is in two files, or not where the index puts it.
    """
    where: dict[str, str] = {}
    for file, tensors in names.items():
        for tensor in tensors:
            if tensor in where:
                raise ModelRefused(f"{shown}: tensor '{tensor}' is in two files: {where[tensor]} and {file}")
            where[tensor] = file
    for tensor, file in folder.named.items():
        if where.get(tensor) != file:
            raise ModelRefused(f"{shown}/{folder.index}: tensor '{tensor}' is not in {file}, where the index puts it")
    return where


def _weight_files(
    path: Path, one: str, index: str, pattern: str, shown: str
) -> tuple[tuple[str, ...], dict[str, str], bool]:
    """Returns the weight files of one family, and what their index says.

    An index may leave out tensors, or whole shards: what the folder holds under a shard's name counts too.
    """
    if (path / index).is_symlink() or (path / index).exists():
        named = read_json(path, index, shown).get("weight_map")
        if not isinstance(named, dict) or not all(isinstance(v, str) for v in named.values()):
            raise ModelRefused(f"{shown}/{index} has no 'weight_map' from tensors to files")
        for tensor, file in named.items():
            if file != Path(file).name or file in ("", ".", "..") or "\0" in file or "\\" in file:
                raise ModelRefused(
                    f"{shown}/{index}: tensor '{tensor}' lies in {file!r}, which is not a plain file name"
                )
        names = sorted({*named.values(), *(p.name for p in path.glob(pattern))})
        has_index = True
    else:
        named, has_index = {}, False
        names = (
            [one] if (path / one).is_symlink() or (path / one).exists() else sorted(p.name for p in path.glob(pattern))
        )
    for name in names:
        check_plain(path / name, f"{shown}/{name}")
    return tuple(names), named, has_index


def read_json(path: Path, name: str, shown: str) -> dict[str, Any]:
    """Returns the JSON object in a plain file of a folder."""
    size = check_plain(path / name, f"{shown}/{name}")
    if size > MAX_JSON_BYTES:
        raise ModelRefused(f"{shown}/{name} has {size} bytes; allowed: {MAX_JSON_BYTES}")
    try:
        content = json.loads((path / name).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ModelRefused(f"{shown}/{name} is not valid JSON: {' '.join(str(error).split())[:160]}") from error
    if not isinstance(content, dict):
        raise ModelRefused(f"{shown}/{name} is not a JSON object")
    return content


def check_plain(path: Path, shown: str) -> int:
    """Returns the size of a regular file; refuses links and all else before anything is opened."""
    try:
        found = path.lstat()
    except OSError:
        raise ModelRefused(f"{shown} does not exist", hint=f"looked for {path}") from None
    wrong = ""
    if stat.S_ISLNK(found.st_mode):
        wrong = "is a symbolic link, as in the hub's cache"
    elif not stat.S_ISREG(found.st_mode):
        wrong = "is not a regular file"
    if wrong:
        raise ModelRefused(
            f"{shown} {wrong}; nothing outside the folder is read", hint="make a copy with the files in it: cp -rL"
        )
    return found.st_size


def _refuse_code(config: dict[str, Any], shown: str) -> None:
    """Refuses a config that asks for code of the folder or the hub; there is no flag that allows it."""
    pending: list[tuple[str, Any]] = [("", config)]
    while pending:
        place, value = pending.pop()
        if isinstance(value, dict):
            for key, child in value.items():
                if key == "auto_map":
                    raise ModelRefused(
                        f"{shown}/{CONFIG} has '{place}auto_map': the model brings code of its own, which is never run",
                        hint="write a factory that builds the model from code that you have read",
                    )
                pending.append((f"{place}{key}.", child))
        elif isinstance(value, list):
            pending += [(place, child) for child in value]


def _refuse_quantised(config: dict[str, Any], shown: str) -> None:
    if config.get("quantization_config") is not None:
        quantization = config["quantization_config"]
        method = str(quantization.get("quant_method", "unnamed") if isinstance(quantization, dict) else quantization)
        raise ModelRefused(
            f"{shown}/{CONFIG} has 'quantization_config': its weights are not plain tensors ({method[:40]})",
            hint="use the folder of the model before it was quantised",
        )
