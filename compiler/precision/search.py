"""Which nodes to hold back for a graph to stay within its tolerance. Pure: it only calls the judge.

    losses of the nodes alone -> the shortest prefix of the worst that is enough -> each held node tried released
        measured, adaptive              predicted, then judged                    until none can be

The errors of converted nodes are nearly independent, so that their squares add up. Agreement is 1 - d^2 / 2, thus what
a graph loses (1 - agreement) is about the sum of what its nodes lose alone: that predicts how many must be held.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from math import inf, isinf
from typing import Any

Judge = Callable[[frozenset[str]], float]


@dataclass(frozen=True)
class SearchResult:
    """Which nodes to hold back.

    Attributes:
        held: names, the worst first.
        score: the judge's answer for exactly these.
        first: its answer with none held.
        runs: how often it and its probe were asked.
        reached: whether the score is within the tolerance.
        minimal: whether releasing any one of the held nodes was judged, and was too much.
        losses: what each node loses alone; for one that was measured in a group, its share. Empty where no node had
            to be held.
    """

    held: tuple[str, ...]
    score: float
    first: float
    runs: int
    reached: bool
    minimal: bool
    losses: Mapping[str, float]

    def to_json(self) -> dict[str, Any]:
        """Returns it as plain data, with the losses of the held nodes alone: what a report needs."""
        return {**asdict(self), "held": list(self.held), "losses": {n: self.losses[n] for n in self.held}}

    def note(self) -> str:
        """Returns what was proved of the set, in a sentence."""
        if not self.held:
            return "no node had to be held for accuracy"
        count = f"{len(self.held)} node(s) held for accuracy"
        if self.minimal:
            return f"{count}: each was tried released, and the agreement was too low without it"
        return f"{count}: the budget of {self.runs} graphs was spent before each was tried released; fewer may do"


def search_from_json(found: Mapping[str, Any]) -> SearchResult:
    """Reads what `SearchResult.to_json` gave."""
    return SearchResult(**{**found, "held": tuple(found["held"])})


class _Asked:
    """The judge and its probe, with a memory and one budget."""

    def __init__(self, judge: Judge, probe: Judge, max_runs: int) -> None:
        self._judge, self._probe, self._max_runs = judge, probe, max_runs
        self._scores: dict[frozenset[str], float] = {}
        self._probed = 0

    def probe(self, held: frozenset[str]) -> float:
        self._probed += 1
        return self._probe(held)

    def __call__(self, held: frozenset[str]) -> float:
        if held not in self._scores:
            self._scores[held] = self._judge(held)
        return self._scores[held]

    @property
    def runs(self) -> int:
        return len(self._scores) + self._probed

    @property
    def left(self) -> int:
        return self._max_runs - self.runs

    def can(self, held: frozenset[str]) -> bool:
        return held in self._scores or self.left > 0

    def best(self) -> tuple[frozenset[str], float]:
        return max(self._scores.items(), key=lambda item: item[1])


def find_holds(
    judge: Judge,
    probe: Judge,
    names: Sequence[str],
    threshold: float,
    max_runs: int,
    *,
    keep_one: bool = False,
    known: SearchResult | None = None,
) -> SearchResult:
    """Finds a small set of nodes that, held back, brings the score to the threshold.

    Args:
        judge: the score with exactly these nodes held back; higher is better, 1 is equal.
        probe: a cheaper score, by which nodes are only ranked.
        names: the nodes that may be held back.
        threshold: the score to reach.
        max_runs: how often both may be asked, at least 1.
        keep_one: never hold them all.
        known: what a search of the same graph found; it is taken as it is, where it holds none but these nodes.
    """
    if known is not None and set(known.held) <= set(names):
        return known
    ask = _Asked(judge, probe, max_runs)
    first = ask(frozenset())
    if first >= threshold:
        return SearchResult((), first, first, ask.runs, True, True, {})
    losses = _losses(ask, names, 1 - threshold, (max_runs - 1) // 2)
    ranked = sorted(names, key=lambda n: -losses[n])
    size = _enough(ask, ranked, losses, threshold, len(ranked) - keep_one)
    if size is None:
        held, score = ask.best()
        ordered = tuple(n for n in ranked if n in held)
        return SearchResult(ordered, score, first, ask.runs, False, False, losses)
    kept, minimal = _released(ask, ranked[:size], threshold)
    return SearchResult(tuple(kept), ask(frozenset(kept)), first, ask.runs, True, minimal, losses)


def _losses(ask: _Asked, names: Sequence[str], allowed: float, budget: int) -> dict[str, float]:
    """Measures what each node loses with all others held; where they are too many, what groups of them lose.

    The group that loses most is halved again and again, so that the runs go where the losses are.
    """
    everything = frozenset(names)

    def loss(group: tuple[str, ...]) -> float:
        return 1 - ask.probe(everything - frozenset(group))

    if len(names) <= budget:
        return {name: max(0.0, loss((name,))) for name in names}
    groups = [(-inf, 0, tuple(names))]
    number = 0
    while budget >= number + 2:
        worst, _, group = groups[0]
        if -worst < allowed / 16 or len(group) == 1:
            break
        heapq.heappop(groups)
        middle = len(group) // 2
        for half in (group[:middle], group[middle:]):
            number += 1
            # A single node cannot be split: it goes behind all groups, with its loss kept.
            measured = max(0.0, loss(half))
            heapq.heappush(groups, (-measured if len(half) > 1 else measured, number, half))
    return {name: 0.0 if isinf(found) else abs(found) / len(group) for found, _, group in groups for name in group}


def _enough(
    ask: _Asked, ranked: Sequence[str], losses: Mapping[str, float], threshold: float, limit: int
) -> int | None:
    """Returns the length of a prefix that reaches the threshold, or None: predicted first, then corrected."""
    remaining = list(accumulate(losses[n] for n in reversed(ranked)))[::-1]
    size = next((k for k in range(1, len(ranked)) if remaining[k] <= 1 - threshold), limit)
    size = max(1, min(size, limit))
    low, step = 0, 1
    high: int | None = None
    while limit > 0 and ask.left and (high is None or high - low > 1):
        if high is None and ask.left == 1:
            size = limit  # a result at any cost before a refusal
        if ask(frozenset(ranked[:size])) >= threshold:
            high = size
        else:
            low = size
        if low == limit:
            return None
        size = max((low + high) // 2, high - step) if high is not None else min(limit, low + step)
        step *= 2
    return high


def _released(ask: _Asked, held: Sequence[str], threshold: float) -> tuple[list[str], bool]:
    """Releases what can be, the least harmful first; True where each of the rest was tried against this very set."""
    kept = list(held)
    while True:
        before = len(kept)
        for name in reversed(tuple(kept)):
            without = frozenset(kept) - {name}
            if not ask.can(without):
                return kept, False
            if ask(without) >= threshold:
                kept.remove(name)
        if len(kept) == before:
            return kept, True
