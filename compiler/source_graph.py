"""The source as every later stage sees it: its graph, its reference outputs, and what is told of it.

Made once and kept in the cache, so that a build that changes the precision, the target, the tolerance or the serving
neither loads the model nor exports it. Reference and graph are one entry: a factory without a seed gives other
weights each time, and only what was made together belongs together.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compiler.cache import ENTRY_FILE, Cache, Note
from compiler.cases import Case, best_case, export_sizes, make_case
from compiler.dtypes import AnyArray
from compiler.files import file_sha256
from compiler.fingerprint import code_fingerprint, cpu_description, inputs_fingerprint, sha256_json
from compiler.graph_stats import graph_stats
from compiler.metric import eager_metric, metric_code, metric_files
from compiler.oracle import check_repeatable, check_rows
from compiler.passes import num_nodes
from compiler.progress import Stage
from compiler.recorded import REFERENCE_FILE, load_outputs
from compiler.reference import check_output_shapes
from compiler.sources import open_source, source_files, source_packages
from compiler.spec import ModelSpec
from compiler.targets.onnxruntime import MODEL_FILE, write_onnx

if TYPE_CHECKING:
    import onnx_ir as ir

    from compiler.sources.base import OpenedSource

References = Mapping[str, Mapping[str, AnyArray]]

KIND = "model"
# Of a spec, what decides the graph and the outputs; the name and the dims seed and shape the cases.
_SPEC_KEYS = ("name", "source", "dims", "inputs", "outputs", "opset")
_PACKAGES = ("torch", "onnx", "onnx-ir", "onnxscript", "onnxruntime", "onnxruntime-gpu", "numpy")


@dataclass(frozen=True)
class SourceFacts:
    """What the report says of the source; plain data.

    Attributes:
        code: what identifies the user's code that ran, as `sources.code.factory_code` names it.
        notes: how it was opened; export_notes: what the export changed.
        trusted: what was opened although it can run code.
        stats: the exported graph's cost at the opt sizes.
        eager_metric: what the user's own metric says of the model as it was given.
    """

    description: str
    notes: tuple[str, ...]
    trusted: tuple[str, ...]
    num_parameters: int
    code: dict[str, str]
    exporter: str
    opset: int
    export_notes: tuple[str, ...]
    stats: dict[str, Any]
    eager_metric: float | None = None


@dataclass(frozen=True)
class SourceGraph:
    """The exported graph with the outputs that every file made from it must give.

    Attributes:
        key: the hash of what both depend on; content: that of the two, which differs for a factory without a seed.
    """

    model: ir.Model
    references: References
    facts: SourceFacts
    key: str
    content: str


def source_key(spec: ModelSpec) -> str:
    """Returns the hash of what the graph and the outputs depend on, but for the code of the factory."""
    document = {key: value for key, value in spec.document.items() if key in _SPEC_KEYS}
    if spec.metric:  # its limits judge the value, they do not change it
        document["metric"] = {"function": spec.metric.function, "args": spec.metric.args}
    packages = (*_PACKAGES, *source_packages(spec))
    made_from = inputs_fingerprint(document, {**source_files(spec), **metric_files(spec)}, packages)
    # Another processor rounds otherwise.
    return sha256_json({**made_from, "processor": cpu_description()})


def source_graph(
    spec: ModelSpec, cases: Sequence[Case], *, trust_pickle: bool, cache: Cache | None, stage: Stage
) -> SourceGraph:
    """Returns graph and references, from the cache or from the source.

    Raises:
        ModelkilnError: the source cannot be opened, fails on a case, or cannot be exported.
    """
    key = source_key(spec)
    with stage("load the model") as log:
        found = _find(spec, cases, cache, key, trust_pickle, log.note) if cache else None
        log.from_cache = found is not None
        source = None if found else open_source(spec, trust_pickle=trust_pickle)
        told = found.facts if found else source
        assert told is not None
        for line in (told.description, *told.notes):
            log.note(line)
    if found is not None:
        return _from_cache(found, stage)
    assert source is not None
    with tempfile.TemporaryDirectory(prefix="modelkiln-") as work:
        return _make(spec, cases, source, cache, key, Path(work), stage)


def _find(
    spec: ModelSpec, cases: Sequence[Case], cache: Cache, key: str, trust_pickle: bool, note: Note
) -> SourceGraph | None:
    def fits(facts: dict[str, Any]) -> bool:
        code = facts["code"]
        # What a build without --trust-pickle would refuse, it must not get from one with it.
        return code_fingerprint(code, spec.path.parent) == code and (trust_pickle or not facts["trusted"])

    entry = cache.find(KIND, key, fits, note)
    if entry is None:
        return None
    facts = _facts_from_json(entry.facts)
    if spec.metric and facts.eager_metric is not None and spec.metric.problem(facts.eager_metric):
        return None  # the same refusal as without the cache
    try:
        references = load_outputs(entry.folder / REFERENCE_FILE, cases)
        return SourceGraph(read_graph(entry.folder), references, facts, key, _content(entry.folder))
    except OSError:
        return None  # another build pruned it just now


def _from_cache(graph: SourceGraph, stage: Stage) -> SourceGraph:
    with stage("run the reference") as log:
        log.from_cache = True
    with stage("export to ONNX") as log:
        log.from_cache = True
        _tell(log.note, graph)
    return graph


def _make(
    spec: ModelSpec,
    cases: Sequence[Case],
    source: OpenedSource,
    cache: Cache | None,
    key: str,
    folder: Path,
    stage: Stage,
) -> SourceGraph:
    with stage("run the reference") as log:
        traced = make_case(spec, "export", export_sizes(spec), padded=False)
        first = source.reference(traced)
        references: dict[str, dict[str, AnyArray]] = {}
        for done, case in enumerate(cases, start=1):
            references[case.name] = source.reference(case)
            log.step(done, len(cases))
        check_repeatable(traced, first, source.reference(traced), source.changed())
        score = eager_metric(spec, lambda inputs: source.reference(Case("a call of the metric", {}, dict(inputs))))
    with stage("export to ONNX") as log:
        exported = source.export(traced)
        # After the export, which names the line where a size was baked in.
        for case in cases:
            check_output_shapes(spec, case, references[case.name])
        check_rows(spec, source.reference, traced, first)
        code = {**source.code(), **metric_code(spec)}
        write_onnx(exported.model, folder)
        arrays = {f"{case}/{name}": array for case, outputs in references.items() for name, array in outputs.items()}
        np.savez(folder / REFERENCE_FILE, **arrays)  # type: ignore[arg-type]
        # Read back even where no cache is: a build from the cache and one without it give the same bytes.
        model = read_graph(folder)
        facts = SourceFacts(
            description=source.description,
            notes=source.notes,
            trusted=source.trusted,
            num_parameters=source.num_parameters,
            code=code,
            exporter=exported.exporter,
            opset=exported.opset,
            export_notes=exported.notes,
            stats=graph_stats(model, best_case(spec)).to_json(),
            eager_metric=score,
        )
        graph = SourceGraph(model, references, facts, key, _content(folder))
        _tell(log.note, graph)
        if cache and (problem := cache.store(KIND, key, sha256_json(code), spec.name, folder, asdict(facts))):
            log.note(f"note: not kept in the cache {cache.path}: {problem}")
    return graph


def _content(folder: Path) -> str:
    return sha256_json({file.name: file_sha256(file) for file in sorted(folder.iterdir()) if file.name != ENTRY_FILE})


def read_graph(folder: Path) -> ir.Model:
    """Reads a graph with all its weights: the folder may be gone when they are needed."""
    import onnx_ir

    model = onnx_ir.load(folder / MODEL_FILE)
    return onnx_ir.external_data.load_to_model(model)


def _tell(note: Note, graph: SourceGraph) -> None:
    note(f"opset {graph.facts.opset}, {num_nodes(graph.model)} nodes")
    for line in graph.facts.export_notes:
        note(line)


def _facts_from_json(facts: dict[str, Any]) -> SourceFacts:
    lists = {key: tuple(facts[key]) for key in ("notes", "trusted", "export_notes")}
    return SourceFacts(**{**facts, **lists})
