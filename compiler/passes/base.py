"""What a pass is: a function from a graph to a graph, with an honest count of what it did."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import onnx_ir as ir


@dataclass(frozen=True)
class PassResult:
    """The outcome of one pass.

    Attributes:
        model: the rewritten graph (passes work on a copy that the pipeline made).
        counts: how often each rewrite was applied; zero where it was looked for and not found.
        notes: sentences for the report, such as an input that was pruned.
    """

    model: ir.Model
    counts: dict[str, int]
    notes: tuple[str, ...] = field(default=())

    @property
    def modified(self) -> bool:
        return any(self.counts.values())


@dataclass(frozen=True)
class Pass:
    """A named rewrite.

    Attributes:
        verify: False only where the rewrite cannot change a number.
        stage: when it runs. `clean` first; then half precision is written; then `fuse`, which makes operators that only
            the target knows; then int8 is written; `last` what would take nodes away from that choice.
    """

    name: str
    run: Callable[[ir.Model], PassResult]
    verify: bool = True
    stage: Literal["clean", "fuse", "last"] = "clean"


def num_nodes(model: ir.Model) -> int:
    """Returns the number of nodes, those of subgraphs included."""
    return sum(1 for graph in model.graphs() for _ in graph)
