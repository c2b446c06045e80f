"""How few nodes must be held back for a graph to stay within its tolerance. Pure: it only calls the judge."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class SearchResult:
    """Which nodes to hold back.

    Attributes:
        held: names, the riskiest first.
        score: the judge's answer for exactly these.
        runs: how often the judge was asked.
        reached: whether the score is within the tolerance.
    """

    held: tuple[str, ...]
    score: float
    runs: int
    reached: bool


def hold_back(
    judge: Callable[[Sequence[str]], float], ranked: Sequence[str], threshold: float, max_runs: int
) -> SearchResult:
    """Finds a short prefix of `ranked` that, held back, brings the score to the threshold.

    Doubles the prefix until the score is good, then halves the gap to the last bad one, while runs are left. With
    perfect ranking the prefix is the shortest; a result is always one that was judged.

    Args:
        judge: the score with these nodes held back; higher is better.
        ranked: candidates, the riskiest first.
        threshold: the score to reach.
        max_runs: how often the judge may be asked, at least 1.
    """
    scores: dict[int, float] = {}

    def score(size: int) -> float:
        if size not in scores:
            scores[size] = judge(ranked[:size])
        return scores[size]

    low, high = -1, 0
    while score(high) < threshold and high < len(ranked) and len(scores) < max_runs:
        # The last run goes to the largest prefix: a result at any cost before a refusal.
        last = len(scores) == max_runs - 1
        low, high = high, len(ranked) if last else min(len(ranked), max(1, 2 * high))
    if score(high) < threshold:
        best = max(scores, key=lambda size: scores[size])
        return SearchResult(tuple(ranked[:best]), scores[best], len(scores), reached=False)
    while high - low > 1 and len(scores) < max_runs:
        middle = (low + high) // 2
        if score(middle) < threshold:
            low = middle
        else:
            high = middle
    return SearchResult(tuple(ranked[:high]), scores[high], len(scores), reached=True)
