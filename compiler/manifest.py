"""What a version says of itself: the manifest, and the result of the build that wrote it."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from compiler import __version__
from compiler.build_key import build_key
from compiler.candidates import Candidate
from compiler.progress import StageTime
from compiler.repository import Published
from compiler.source_graph import SourceFacts
from compiler.spec import ModelSpec
from compiler.targets.registry import ArtifactTensor, target_named


@dataclass(frozen=True)
class BuildResult:
    """The outcome of `compile build` for one spec.

    Attributes:
        published: the version in the repository.
        built: False where the newest version was made from the same inputs and nothing was done.
        seconds: wall time.
        stages: what each stage took; none where nothing was done.
    """

    published: Published
    built: bool
    seconds: float
    stages: tuple[StageTime, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "model": self.published.model,
            "version": self.published.version,
            "built": self.built,
            "seconds": round(self.seconds, 3),
            "stages": [stage.to_json() for stage in self.stages],
            "path": str(self.published.folder),
            "manifest": self.published.manifest,
        }


def manifest_head(
    document: dict[str, Any], fingerprint: dict[str, Any], code: dict[str, str], path: Path, flags: str = ""
) -> dict[str, Any]:
    """Returns what every manifest begins with: the inputs, and how to make the version again."""
    return {
        "build_key": build_key(fingerprint, code),
        "created_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": f"compile build {path.name}{flags}",
        "modelkiln": __version__,
        "platform": f"{platform.system()} {platform.machine()}",
        "made_from": fingerprint,
        "code": code,
        "spec": document,
    }


def model_manifest(
    spec: ModelSpec,
    source: SourceFacts,
    candidates: Sequence[Candidate],
    chosen: Candidate,
    interface: tuple[Sequence[ArtifactTensor], Sequence[ArtifactTensor]],
) -> dict[str, Any]:
    """Returns what a compiled model's manifest holds besides its head and its references."""
    assert chosen.parity is not None
    target = target_named(chosen.choice.target)
    inputs, outputs = interface
    return {
        "source": {
            "description": source.description,
            "notes": [*source.notes, *source.export_notes],
            "trusted": list(source.trusted),
        },
        "target": chosen.choice.target,
        "backend": target.backend,
        "precision": chosen.choice.precision,
        "artifact": chosen.facts,
        "exporter": source.exporter,
        "opset": source.opset,
        "parameters": source.num_parameters,
        "inputs": [_tensor_json(t) for t in inputs],
        "outputs": [_tensor_json(t) for t in outputs],
        "graph": {
            "sizes": {name: dim.opt for name, dim in spec.dims.items()},
            "exported": source.stats,
            "shipped": chosen.stats.to_json() if chosen.stats else None,
        },
        "passes": [report.to_json() for report in chosen.passes],
        "parity": {
            "judged_on": chosen.judged_on,
            "artifact_was_run": chosen.judged_on == target.model_file,
            **chosen.parity.to_json(),
        },
        "metric": spec.metric.to_json(chosen.metric, source.eager_metric) if spec.metric else None,
        "slo": asdict(spec.slo) if spec.slo else None,
        "candidates": [candidate.to_json() for candidate in candidates],
    }


def _tensor_json(tensor: ArtifactTensor) -> dict[str, Any]:
    return {"name": tensor.name, "onnx_type": tensor.onnx_type, "shape": list(tensor.shape)}
