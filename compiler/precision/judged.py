"""How a search judges its graphs: on samples that are few, spread over all, and bounded by the work they make."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from compiler.dtypes import AnyArray
from compiler.precision.accuracy import agreement
from compiler.precision.costs import node_work
from compiler.precision.observe import Samples, each_output, run_outputs

if TYPE_CHECKING:
    import onnx_ir as ir

MAX_SAMPLES = 8
# A graph of the search should take some tenths of a second on two cores. By operations, not by time: the same data
# must give the same graph on any machine.
MAX_FLOPS = 15_000_000_000


def judge_samples(model: ir.Model, samples: Samples) -> list[Mapping[str, AnyArray]]:
    """Returns evenly spread samples, so that a sorted set is not judged by its first part; at least one of one or more.

    Args:
        model: a prepared graph.
        samples: all of them.
    """
    if not samples:
        return []
    smallest = min(samples, key=_num_elements)
    flops = sum(f for f, _ in node_work(model, smallest).values())
    # Work per element of the inputs: what grows faster than that is small beside the products.
    per_element = flops / max(1, _num_elements(smallest))
    for count in range(min(MAX_SAMPLES, len(samples)), 0, -1):
        # The middles of `count` equal parts.
        spread = [samples[(2 * i + 1) * len(samples) // (2 * count)] for i in range(count)]
        if per_element * sum(map(_num_elements, spread)) <= MAX_FLOPS:
            return spread
    return [smallest]


class Judge:
    """The agreement with fp32 of the graph in which some nodes are held.

    Args:
        base: the fp32 graph.
        build: returns the converted graph with the named nodes held.
        samples: to judge by, at least one.
        threshold: what is asked. A graph that falls below it on one sample is not run on the others.
    """

    def __init__(
        self, base: ir.Model, build: Callable[[frozenset[str]], ir.Model], samples: Samples, threshold: float
    ) -> None:
        self._build, self._threshold = build, threshold
        self._cases = list(zip(samples, run_outputs(base, samples), strict=True))

    def __call__(self, held: frozenset[str]) -> float:
        """Returns the worst agreement on the samples; where it is below the threshold, that of the first so found."""
        model = self._build(held)
        scores: list[float] = []
        for (_, want), got in zip(self._cases, each_output(model, [s for s, _ in self._cases]), strict=False):
            scores.append(agreement([want], [got]))
            # The graph without any hold is judged in full: it tells which sample to begin with.
            if held and scores[-1] < self._threshold:
                break
        if not held:
            order = sorted(range(len(scores)), key=lambda i: scores[i])
            self._cases = [self._cases[i] for i in order]
        return min(scores)

    def probe(self, held: frozenset[str]) -> float:
        """Returns the agreement on the worst sample alone, to tell what single nodes lose."""
        sample, want = self._cases[0]
        return agreement([want], run_outputs(self._build(held), [sample]))


def _num_elements(sample: Mapping[str, AnyArray]) -> int:
    return sum(a.size for a in sample.values())
