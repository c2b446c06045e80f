"""Built graphs on disk. A graph that is read from there is mapped, not loaded, so that weights are in memory once."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path

import openvino as ov

from backends.llm.loaders.base import LoadedModel
from backends.llm.runners.openvino.attention import set_head_sizes
from backends.llm.runners.openvino.graph import build_graph
from backends.llm.runners.openvino.options import WeightFormat
from compiler.errors import ModelRefused

_FILE = "decoder.xml"  # with decoder.bin beside it


def cached_graph(model: LoadedModel, form: WeightFormat, folder: Path) -> ov.Model:
    """Returns the graph of this model in this form; builds and keeps it where it is not in the folder yet.

    Several processes may do so at once: a graph appears in one step, and whoever comes second uses the first one's.

    Raises:
        ModelRefused: what is in the folder cannot be read.
    """
    place = folder / _key(model, form)
    if not place.exists():
        _publish(build_graph(model, form), place)
    core = ov.Core()
    core.get_property("CPU", "FULL_DEVICE_NAME")  # loads the plugin, and with it the operator of the paged attention
    try:
        graph = core.read_model(place / _FILE)
    except RuntimeError as e:
        raise ModelRefused(f"the graph in {place} is damaged: {e}", hint="remove that folder") from None
    for node in graph.get_ops():
        if node.get_type_name() == "PagedAttentionExtension":
            set_head_sizes(node, model.config)  # not kept in the file
    return graph


def _key(model: LoadedModel, form: WeightFormat) -> str:
    """Returns a name that changes with the model's files, the form, OpenVINO and the code that builds the graph."""
    sources = sorted(Path(__file__).parent.glob("*.py")) + sorted(Path(__file__).parents[2].glob("models/*.py"))
    parts = {
        "config": asdict(model.config),
        "files": dict(model.source),
        "form": form,
        "openvino": ov.__version__,
        "code": {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sources},
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def _publish(graph: ov.Model, place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    staged = Path(tempfile.mkdtemp(prefix=f".{place.name}-", dir=place.parent))
    try:
        ov.save_model(graph, staged / _FILE, compress_to_fp16=False)
        os.rename(staged, place)
    except OSError:
        if not place.exists():
            raise
    finally:
        shutil.rmtree(staged, ignore_errors=True)
