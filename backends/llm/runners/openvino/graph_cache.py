"""Built graphs on disk, to be mapped: the plugin packs a copy of the weights, and what it packed them from can go then.

Three places: a cache, which fills itself; a published version, which carries the graph that was proved; and, without
either, a temporary file that has no name any more.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path

import openvino as ov

from backends.llm.loaders.base import LoadedModel
from backends.llm.runners.openvino.attention import set_head_sizes
from backends.llm.runners.openvino.graph import build_graph
from backends.llm.runners.openvino.options import OpenVinoOptions, WeightFormat
from compiler.errors import ModelRefused

log = logging.getLogger(__name__)

_FILE = "decoder.xml"  # with decoder.bin beside it
_CARRIED = "graph-"  # KEY.xml and KEY.bin


def open_graph(model: LoadedModel, form: WeightFormat, options: OpenVinoOptions) -> tuple[ov.Model, Path | None]:
    """Returns the graph of a model in a form, and the folder of the file that it is mapped from.

    Raises:
        ModelRefused: what is in the cache cannot be read.
    """
    if options.graph_dir is not None:
        carried = carried_graph(model, form, Path(options.graph_dir))
        if carried is not None:
            return carried, Path(options.graph_dir)
    if options.cache_dir is not None:
        return cached_graph(model, form, Path(options.cache_dir)), Path(options.cache_dir)
    return temporary_graph(model, form)


def temporary_graph(model: LoadedModel, form: WeightFormat) -> tuple[ov.Model, Path | None]:
    """Returns a graph mapped from a file without a name, and where it was; in memory where there is no room for it."""
    graph = build_graph(model, form)
    try:
        with tempfile.TemporaryDirectory(prefix="modelkiln-graph-") as name:
            if shutil.disk_usage(name).free < 2 * _constant_bytes(graph):
                return graph, None
            place = Path(name) / _FILE
            ov.save_model(graph, place, compress_to_fp16=False)
            return _read(place, model), Path(name)
    except OSError:
        return graph, None


def cached_graph(model: LoadedModel, form: WeightFormat, folder: Path) -> ov.Model:
    """Returns the graph of this model in this form; builds and keeps it where it is not in the folder yet.

    Several processes may do so at once: a graph appears in one step, and whoever comes second uses the first one's.

    Raises:
        ModelRefused: what is in the folder cannot be read.
    """
    place = folder / _key(model, form)
    if not place.exists():
        _publish(build_graph(model, form), place)
    try:
        return _read(place / _FILE, model)
    except RuntimeError as e:
        raise ModelRefused(f"the graph in {place} is damaged: {e}", hint="remove that folder") from None


def carried_graph(model: LoadedModel, form: WeightFormat, folder: Path) -> ov.Model | None:
    """Returns the graph that a published version carries, where it is this one; writes nothing.

    None is the answer too where the version was published for another OpenVINO or by another version of this code, or
    its files are damaged: the graph can always be built.
    """
    path = folder / f"{_CARRIED}{_key(model, form)}.xml"
    if not path.is_file():
        if any(folder.glob(f"{_CARRIED}*.xml")):
            log.warning("the graph in the version is of other code or another OpenVINO: built anew; publish it again")
        return None
    try:
        return _read(path, model)
    except RuntimeError as e:
        log.warning("%s is damaged, the graph is built anew: %s", path.name, e)
        return None


def carry_graphs(cache: Path, version: Path) -> None:
    """Moves the graphs of a cache into the folder of a version that is to be published."""
    for place in cache.iterdir():
        for path in place.iterdir():
            path.rename(version / f"{_CARRIED}{place.name}{path.suffix}")


def _read(path: Path, model: LoadedModel) -> ov.Model:
    """Raises RuntimeError for a file that is damaged."""
    core = ov.Core()
    core.get_property("CPU", "FULL_DEVICE_NAME")  # loads the plugin, and with it the operator of the paged attention
    graph = core.read_model(path)
    for node in graph.get_ops():
        if node.get_type_name() == "PagedAttentionExtension":
            set_head_sizes(node, model.config)  # not kept in the file
    return graph


def _constant_bytes(graph: ov.Model) -> int:
    return sum(int(node.get_byte_size()) for node in graph.get_ops() if node.get_type_name() == "Constant")


def _key(model: LoadedModel, form: WeightFormat) -> str:
    """Returns a name that changes with the model's files, the form, OpenVINO and the code that builds the graph."""
    sources = sorted(Path(__file__).parent.glob("*.py")) + sorted(Path(__file__).parents[2].glob("models/*.py"))
    parts = {
        "config": asdict(model.config),
        "files": sorted(model.source.values()),  # their hashes: a published file has another name
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
