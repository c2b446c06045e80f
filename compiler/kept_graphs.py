"""Optimised and converted graphs, kept in the cache: a build that changes the serving or adds a target reuses them."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compiler.cache import Cache, Note
from compiler.calibration_spec import calibration_files
from compiler.cases import Case
from compiler.fingerprint import code_fingerprint, inputs_fingerprint, sha256_json
from compiler.optimise import Choice, PassReport, References, optimise
from compiler.precision.calibration_data import calibration_code
from compiler.precision.search import SearchResult
from compiler.source_graph import SourceGraph, read_graph
from compiler.spec import ModelSpec
from compiler.targets.onnxruntime import write_onnx
from compiler.targets.registry import target_named

if TYPE_CHECKING:
    import onnx_ir as ir

KIND = "graph"


@dataclass(frozen=True)
class KeptGraphs:
    """Gives the graph of a choice, from the cache or made now.

    Attributes:
        source: what the graphs are made from.
        code: filled with what identifies the user's code behind them: a calibration function.
        note: is told what came from the cache.
        known: what the search for nodes to hold found when the same graph was made, from a lock.
    """

    source: SourceGraph
    cache: Cache | None
    code: dict[str, str]
    note: Note
    known: SearchResult | None = None

    def optimise(
        self,
        model: ir.Model,
        spec: ModelSpec,
        choice: Choice,
        cases: Sequence[Case],
        references: References,
        work: Path,
        loss_share: float,
    ) -> tuple[ir.Model, list[PassReport]]:
        """Does what `optimise.optimise` does; the same choice gives the same bytes with and without a cache."""
        key = self._key(spec, choice, loss_share)
        found = self._find(spec, key)
        if found is not None:
            self.note(f"{choice}: the graph is from the cache")
            return found
        made, reports = optimise(model, spec, choice, cases, references, work, loss_share, self.known)
        code = calibration_code(spec) if choice.precision == "int8" else {}
        self.code.update(code)
        with tempfile.TemporaryDirectory(prefix="modelkiln-") as folder:
            write_onnx(made, Path(folder))
            facts = {"code": code, "reports": [asdict(report) for report in reports]}
            if self.cache and (p := self.cache.store(KIND, key, sha256_json(code), spec.name, Path(folder), facts)):
                self.note(f"note: not kept in the cache {self.cache.path}: {p}")
            return read_graph(Path(folder)), reports

    def _key(self, spec: ModelSpec, choice: Choice, loss_share: float) -> str:
        """Returns the hash of what a graph depends on: the tolerance too, since passes and conversions are judged."""
        precisions = ("fp32", choice.precision)
        document = {
            "source": [self.source.key, self.source.content],
            "choice": asdict(choice),
            "loss_share": loss_share,
            "known": self.known.to_json() if self.known else None,
            "limits": [[asdict(spec.tolerance_for(p)), spec.agreement_for(p)] for p in precisions],
            "threads": spec.serving.threads,
            "calibration": asdict(spec.calibration) if spec.calibration and choice.precision == "int8" else None,
        }
        files = calibration_files(spec) if choice.precision == "int8" else {}
        return sha256_json(inputs_fingerprint(document, files, target_named(choice.target).packages))

    def _find(self, spec: ModelSpec, key: str) -> tuple[ir.Model, list[PassReport]] | None:
        def fits(facts: dict[str, Any]) -> bool:
            code: dict[str, str] = facts["code"]
            return code_fingerprint(code, spec.path.parent) == code

        entry = self.cache.find(KIND, key, fits, self.note) if self.cache else None
        if entry is None:
            return None
        try:
            model = read_graph(entry.folder)
        except OSError:
            return None  # another build pruned it just now
        self.code.update(entry.facts["code"])
        lists = ("notes", "held")
        reports = [{**report, **{name: tuple(report[name]) for name in lists}} for report in entry.facts["reports"]]
        return model, [PassReport(**report) for report in reports]
