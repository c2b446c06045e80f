"""What a conversion is asked for and what it says it did: options, held nodes, the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from compiler.calibration_spec import DEFAULT_PERCENTILE, METHODS
from compiler.precision.search import SearchResult

if TYPE_CHECKING:
    import onnx_ir as ir

# Names of nodes that share a reason are listed up to so many.
MAX_NAMES = 4


# The cosine (and the distance that goes with it) a converted graph must keep where the user names none. Half
# precision is judged closer than int8: what it loses beyond this is a range or an epsilon, not rounding.
DEFAULT_MIN_COSINE = {"fp32": 1.0, "fp16": 0.9999, "bf16": 0.999, "int8": 0.99, "int8_dynamic": 0.99}


@dataclass(frozen=True)
class CalibrationOptions:
    """How ranges are taken, and what the result must keep.

    Attributes:
        method: `minmax` (every value seen fits) or `percentile` (rare extremes are clipped).
        percentile: share of the values, in percent, that the range must hold, split over both ends.
        min_cosine: agreement with fp32 below which nodes are held back; None for the precision's default.
        max_runs: graphs that the search for held nodes may run, half of them to find out what each node loses.
        reduce_range: 7-bit weights; None decides by this machine's CPU, and says so.
        known: what the search for the same graph found before; then nothing is searched.
    """

    method: str = METHODS[0]
    percentile: float = DEFAULT_PERCENTILE
    min_cosine: float | None = None
    max_runs: int = 96
    reduce_range: bool | None = None
    known: SearchResult | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ValueError(f"calibration method is {self.method!r}; allowed: {', '.join(METHODS)}")
        if not 50 < self.percentile <= 100:
            raise ValueError(f"percentile is {self.percentile}; allowed: over 50, up to 100")
        if self.min_cosine is not None and not 0 < self.min_cosine <= 1:
            raise ValueError(f"min_cosine is {self.min_cosine}; allowed: over 0, up to 1")
        if self.max_runs < 1:
            raise ValueError(f"max_runs is {self.max_runs}; allowed: 1 and more")

    def threshold(self, precision: str) -> float:
        """Returns the agreement that a graph of this precision must reach."""
        return DEFAULT_MIN_COSINE[precision] if self.min_cosine is None else self.min_cosine


@dataclass(frozen=True)
class Share:
    """A node's part of a graph's work, 0 to 1: floating-point operations, and bytes read and written."""

    flops: float
    bytes: float

    def __str__(self) -> str:
        return f"{self.flops:.1%} of the graph's FLOPs and {self.bytes:.1%} of the bytes it moves"


@dataclass(frozen=True)
class HeldNode:
    """A node that stays in fp32.

    Attributes:
        reason: why.
        share: its part of the graph's work: an estimate of what holding it costs.
    """

    name: str
    op_type: str
    reason: str
    share: Share = Share(0.0, 0.0)


@dataclass(frozen=True)
class PrecisionResult:
    """The outcome of `convert`.

    Attributes:
        model: the typed graph; its inputs and outputs have the types they had.
        held: nodes that would have been converted and stay in fp32, in graph order.
        notes: sentences for the report.
        counts: nodes by what happened to them, and what was inserted.
        agreement: the worst agreement with fp32 on the samples (see `accuracy.agreement`), 1.0 for fp32.
        search: what the search for nodes to hold found, None for fp32.
    """

    model: ir.Model
    precision: str
    held: tuple[HeldNode, ...]
    notes: tuple[str, ...]
    counts: dict[str, int]
    agreement: float = 1.0
    search: SearchResult | None = None


def held_lines(held: Sequence[HeldNode]) -> list[str]:
    """Returns a line for each reason: the nodes, why they are held, and their part of the graph's work."""
    groups: dict[tuple[str, str], list[HeldNode]] = {}
    for node in held:
        groups.setdefault((node.op_type, node.reason), []).append(node)
    lines = []
    for (op_type, reason), nodes in groups.items():
        names = ", ".join(f"'{n.name}'" for n in nodes[:MAX_NAMES])
        more = f" and {len(nodes) - MAX_NAMES} more" if len(nodes) > MAX_NAMES else ""
        share = Share(sum(n.share.flops for n in nodes), sum(n.share.bytes for n in nodes))
        lines.append(f"{op_type} {names}{more} held in fp32: {reason} ({share})")
    return lines
