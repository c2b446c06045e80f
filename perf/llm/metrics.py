"""From outcomes to figures, each as the field defines it. Pure.

    send                first chunk          second               last
     |--------TTFT----------|------gap----------|-------gap---------|
     |-----------------------------E2E------------------------------|

TTFT = first content chunk - send; E2E = last content chunk - send; TPOT = (E2E - TTFT) / (output tokens - 1),
undefined for one token; ITL = each gap / the tokens of the chunk that ends it, once for each of those. The send is
when the request was due: in an open loop a late client must not look like a fast server.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from perf.llm.answers import Answer
from perf.llm.exchange import Outcome
from perf.metrics import count_good, throughput_rps

LIMITS = ("ttft", "tpot", "e2e")
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Figures:
    """Figures of the requests that succeeded, in milliseconds; NaN where one is undefined.

    Attributes:
        ttft, tpot, e2e: one for each request.  # [num_requests]
        itl: one for each token after a request's first chunk.  # [num_later_tokens]
    """

    ttft: Floats
    tpot: Floats
    e2e: Floats
    itl: Floats


def figures_of(outcomes: Sequence[Outcome], streamed: bool = True) -> Figures:
    """The figures of the outcomes that are no failures, in their order.

    Args:
        streamed: False leaves E2E alone: an answer that comes whole has no first token (h11).
    """
    good = [outcome for outcome in outcomes if outcome.ok]
    undefined = np.full(len(good), np.nan)
    e2e = _array(e2e_ms(outcome) for outcome in good)
    if not streamed:
        return Figures(undefined, undefined, e2e, np.empty(0))
    ttft = _array(ttft_ms(outcome) for outcome in good)
    tokens = _array(outcome.answer.output_tokens for outcome in good)
    tpot = np.divide(e2e - ttft, tokens - 1, out=undefined, where=tokens > 1)
    itl = _array(gap for outcome in good for gap in itl_ms(outcome.answer))
    return Figures(ttft, tpot, e2e, itl)


def ttft_ms(outcome: Outcome) -> float:
    """Time to the first content chunk."""
    return (outcome.answer.chunks[0].at_ns - outcome.due_ns) / 1e6


def e2e_ms(outcome: Outcome) -> float:
    """Time to the last content chunk."""
    return (outcome.answer.chunks[-1].at_ns - outcome.due_ns) / 1e6


def itl_ms(answer: Answer) -> list[float]:
    """The time that each token after the first chunk took: a gap divided by the tokens that end it (h08).

    A chunk without a whole token of its own lengthens the gap before the next one that has.
    """
    found: list[float] = []
    waited_ns = 0
    for before, chunk in pairwise(answer.chunks):
        waited_ns += chunk.at_ns - before.at_ns
        if chunk.tokens:
            found += [waited_ns / chunk.tokens / 1e6] * chunk.tokens
            waited_ns = 0
    return found


def tokens_between(outcomes: Sequence[Outcome], start_ns: int, end_ns: int) -> int:
    """Output tokens that came in [start_ns, end_ns), also of requests that began before or ended after."""
    return sum(
        chunk.tokens
        for outcome in outcomes
        if outcome.ok
        for chunk in outcome.answer.chunks
        if start_ns <= chunk.at_ns < end_ns
    )


def goodput_rps(outcomes: Sequence[Outcome], limits: dict[str, float], duration_s: float) -> float:
    """Requests that succeeded and meet every limit per second; a failure is a miss (h07, h16).

    An answer of one token has no TPOT, and so misses no limit of it.
    """
    figures = figures_of(outcomes)
    by_name = {name: np.nan_to_num(getattr(figures, name), nan=0.0) for name in limits}
    good = count_good(by_name, np.full(len(figures.e2e), True), limits)
    return throughput_rps(good, duration_s)


def defined(figures: Floats) -> Floats:
    """The figures that are defined."""
    found: Floats = figures[~np.isnan(figures)]
    return found


def _array(values: Iterable[float]) -> Floats:
    return np.fromiter(values, dtype=np.float64)
