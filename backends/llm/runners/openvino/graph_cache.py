"""Built graphs on disk, to be mapped: the plugin packs a copy of the weights, and what it packed them from can go then.

Three places: a cache, which fills itself; a published version, which carries the graph that was proved; and, without
either, a temporary file that has no name any more.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from pathlib import Path

import openvino as ov

from backends.llm.loaders.base import LoadedModel
from backends.llm.runners.cpu_options import CpuOptions, WeightFormat
from backends.llm.runners.kept import CARRIED, keep, model_key
from backends.llm.runners.openvino.attention import set_head_sizes
from backends.llm.runners.openvino.graph import build_graph
from compiler.errors import ModelRefused

log = logging.getLogger(__name__)

_FILE = "decoder.xml"  # with decoder.bin beside it


def open_graph(model: LoadedModel, form: WeightFormat, options: CpuOptions) -> tuple[ov.Model, Path | None]:
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
        graph = build_graph(model, form)
        keep(place, lambda folder: ov.save_model(graph, folder / _FILE, compress_to_fp16=False))
    try:
        return _read(place / _FILE, model)
    except RuntimeError as e:
        raise ModelRefused(f"the graph in {place} is damaged: {e}", hint="remove that folder") from None


def carried_graph(model: LoadedModel, form: WeightFormat, folder: Path) -> ov.Model | None:
    """Returns the graph that a published version carries, where it is this one; writes nothing.

    None is the answer too where the version was published for another OpenVINO or by another version of this code, or
    its files are damaged: the graph can always be built.
    """
    path = folder / f"{CARRIED}{_key(model, form)}.xml"
    if not path.is_file():
        if any(folder.glob(f"{CARRIED}*.xml")):
            log.warning("the graph in the version is of other code or another OpenVINO: built anew; publish it again")
        return None
    try:
        return _read(path, model)
    except RuntimeError as e:
        log.warning("%s is damaged, the graph is built anew: %s", path.name, e)
        return None


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
    code = sorted(Path(__file__).parent.glob("*.py")) + sorted(Path(__file__).parents[2].glob("models/*.py"))
    return model_key(model, code, form=form, openvino=ov.__version__)
