"""What a runner builds from a model, kept on disk to be mapped: a graph, packed weights.

Two places: a cache, which fills itself, and a published version, which carries what was proved.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from backends.llm.loaders.base import LoadedModel

CARRIED = "graph-"  # KEY.suffix


def model_key(model: LoadedModel, code: Sequence[Path], **facts: str) -> str:
    """Returns a name that changes with the model's files, the facts given and the code."""
    parts = {
        "config": asdict(model.config),
        "files": sorted(model.source.values()),  # their hashes: a published file has another name
        "code": {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in code},
        **facts,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def keep(place: Path, write: Callable[[Path], None]) -> None:
    """Makes a folder of what `write` puts into it; it appears in one step.

    Several processes may do so at once: whoever comes second uses the first one's.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    staged = Path(tempfile.mkdtemp(prefix=f".{place.name}-", dir=place.parent))
    try:
        write(staged)
        os.rename(staged, place)
    except OSError:
        if not place.exists():
            raise
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def carry(cache: Path, version: Path) -> None:
    """Moves what a cache keeps into the folder of a version that is to be published."""
    for place in cache.iterdir():
        for path in place.iterdir():
            path.rename(version / f"{CARRIED}{place.name}{path.suffix}")
