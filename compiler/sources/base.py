"""What an opened source is: the oracle, the graph and what both were made from. All the pipeline knows of sources."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from compiler.cases import Case
from compiler.dtypes import AnyArray
from compiler.spec import ModelSpec

if TYPE_CHECKING:
    import torch

    from compiler.export import Exported


@dataclass(frozen=True)
class OpenedSource:
    """A model that was opened and checked against the spec's names.

    Attributes:
        reference: runs the model as it was given on one case: the oracle that every later file is compared with.
        export: turns it into an ONNX graph with the spec's names, traced at the case's sizes where it is traced.
        code: sha256 by relative path of the source files that ran; called after the export.
        num_parameters: how many numbers the weights hold.
        description: one line for the report, such as `model.onnx: 12 nodes`.
        notes: what the reader of the report should know about how it was opened.
        trusted: what was opened although it can run code, since --trust-pickle allowed it; recorded.
        changed: names the state (buffers) that calls have changed since it was opened.
    """

    reference: Callable[[Case], dict[str, AnyArray]]
    export: Callable[[Case], Exported]
    num_parameters: int
    description: str
    code: Callable[[], dict[str, str]] = field(default=dict)
    notes: tuple[str, ...] = ()
    trusted: tuple[str, ...] = ()
    changed: Callable[[], tuple[str, ...]] = tuple


def opened_module(
    module: torch.nn.Module,
    spec: ModelSpec,
    description: str,
    *,
    code: Callable[[], dict[str, str]] = dict,
    notes: tuple[str, ...] = (),
    trusted: tuple[str, ...] = (),
) -> OpenedSource:
    """Returns the source that an nn.Module is: eager PyTorch is the oracle, torch.export gives the graph.

    Raises:
        SpecError: an input that `forward` does not have, or a required one that the spec lacks.
    """
    from compiler.export import export_onnx
    from compiler.reference import check_signature, run_reference
    from compiler.sources.module import ready

    module = ready(module, description)
    check_signature(module, spec)
    parameters = sum(p.numel() for p in module.parameters())
    changed = changes_of_state(module)
    return OpenedSource(
        reference=lambda case: run_reference(module, spec, case),
        export=lambda case: _with_state_note(export_onnx(module, spec, case), changed()),
        num_parameters=parameters,
        description=f"{description}: {parameters:,} parameters",
        code=code,
        notes=notes,
        trusted=trusted,
        changed=changed,
    )


def _with_state_note(exported: Exported, changed: tuple[str, ...]) -> Exported:
    """Says what forward writes and no output depends on: the file does not do it."""
    note = f"note: forward changes {', '.join(changed)}; the file does not, and no output depends on it"
    return dataclasses.replace(exported, notes=(*exported.notes, *([note] if changed else [])))


def changes_of_state(module: torch.nn.Module) -> Callable[[], tuple[str, ...]]:
    """Returns a function that names the buffers that are no longer what they are now."""
    before = {name: tensor.detach().clone() for name, tensor in module.named_buffers()}

    def changed() -> tuple[str, ...]:
        import torch

        now = dict(module.named_buffers())
        return tuple(n for n, t in before.items() if n in now and not torch.equal(t, now[n]))

    return changed


def trust_note(name: str) -> str:
    """Returns the warning for the report about a file that was allowed to run code."""
    return f"warning: {name} was opened with --trust-pickle: whoever wrote it could run code on this machine"
