"""Packed weights in memory or mapped from a file: of a published version, or of a cache that fills itself."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from backends.llm.loaders.base import LoadedModel
from backends.llm.runners.cpu_options import CpuOptions
from backends.llm.runners.kept import CARRIED, keep, model_key
from backends.llm.runners.memory import give_back_memory, zeroed
from backends.llm.runners.numba.packing import PackedModel, fill, packed_bytes, views
from compiler.errors import ModelRefused

if TYPE_CHECKING:
    import numpy.typing as npt

log = logging.getLogger(__name__)

_SUFFIX = ".packed"
_FILE = f"decoder{_SUFFIX}"


def open_packed(model: LoadedModel, options: CpuOptions) -> PackedModel:
    """Returns the packed weights of a model; reads and packs them where they are nowhere yet.

    Raises:
        ModelRefused: what is in the cache is damaged.
    """
    size = packed_bytes(model.config)
    if options.graph_dir is not None and (carried := _carried(model, Path(options.graph_dir), size)) is not None:
        return views(model.config, carried)
    if options.cache_dir is not None:
        place = Path(options.cache_dir) / _key(model)
        if not place.exists():
            keep(
                place,
                lambda folder: fill(views(model.config, _mapped(folder / f"decoder{_SUFFIX}", size, "w+")), model),
            )
        path = place / f"decoder{_SUFFIX}"
        if not path.is_file() or path.stat().st_size != size:
            raise ModelRefused(f"the weights in {place} are damaged", hint="remove that folder")
        return views(model.config, _mapped(path, size, "r"))
    packed = views(model.config, zeroed(size))
    fill(packed, model)
    give_back_memory()  # of packing
    return packed


def _carried(model: LoadedModel, folder: Path, size: int) -> npt.NDArray[np.uint8] | None:
    """Returns the weights that a published version carries, where they are these; they can always be packed anew."""
    path = folder / f"{CARRIED}{_key(model)}{_SUFFIX}"
    if not path.is_file():
        if any(folder.glob(f"{CARRIED}*{_SUFFIX}")):
            log.warning("the packed weights in the version are of other code: packed anew; publish it again")
        return None
    if path.stat().st_size != size:
        log.warning("%s is damaged, the weights are packed anew", path.name)
        return None
    return _mapped(path, size, "r")


def _mapped(path: Path, size: int, mode: Literal["r", "w+"]) -> npt.NDArray[np.uint8]:
    return np.memmap(path, np.uint8, mode, shape=(size,))


def _key(model: LoadedModel) -> str:
    code = [Path(__file__).with_name("packing.py"), *sorted(Path(__file__).parents[2].glob("models/*.py"))]
    return model_key(model, code, form="packed")
