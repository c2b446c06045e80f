"""How long steps take by their size, as measured: for drafts that must pay, and deadlines that must be met. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_UP = 0.05  # how far a longer step moves the time of a size; a shorter one is taken as it is
_FEWEST = 3  # steps of a size that are needed to judge it
_STALE_STEPS = 300  # a size that was not seen for so long is forgotten, and so tried again


@dataclass(frozen=True, slots=True)
class StepTime:
    """What a step of n tokens takes: fixed_s + per_token_s * n seconds."""

    fixed_s: float
    per_token_s: float

    def of(self, num_tokens: int) -> float:
        return self.fixed_s + self.per_token_s * num_tokens


@dataclass(slots=True)
class _Size:
    """The steps of about one size.

    Attributes:
        num_tokens: their mean size, the newest counting most.
        seconds: what one takes where nothing gets in its way; other work, and the first of a size, only take longer.
        last: the number of the newest step.
    """

    num_tokens: float
    seconds: float
    count: int = 0
    last: int = 0

    def add(self, num_tokens: int, seconds: float, number: int) -> None:
        self.count += 1
        self.last = number
        self.num_tokens += (num_tokens - self.num_tokens) / min(self.count, 20)
        self.seconds = quick(self.seconds, seconds)


class StepTimes:
    """What steps take by their size: the typical times of the sizes that were seen, and lines through them.

    Steps with prompts and those without are sizes of their own, since a token of a prompt takes another time.
    """

    def __init__(self) -> None:
        self._sizes: dict[tuple[bool, int], _Size] = {}
        self._num_steps = 0

    def observe(self, num_tokens: int, seconds: float, *, has_prompts: bool = False) -> None:
        """Takes one step."""
        self._num_steps += 1
        key = (has_prompts, int(4 * math.log2(num_tokens)))  # a size is 19% wide
        self._sizes.setdefault(key, _Size(num_tokens, seconds)).add(num_tokens, seconds, self._num_steps)

    def fit(self) -> StepTime | None:
        """Returns the line of steps without prompts; None where fewer than two sizes are known."""
        sizes = self._known(with_prompts=False)
        return _line(sizes) if len(sizes) > 1 else None

    def seconds(self, num_tokens: int) -> float:
        """Returns what a step with that many tokens takes at the least, prompts or not.

        Where one size alone is known, a smaller step may take its share and a larger one no more than it; 0 where none
        was seen often enough.
        """
        sizes = self._known(with_prompts=True)
        if len(sizes) < 2:
            return sizes[0].seconds * min(1.0, num_tokens / sizes[0].num_tokens) if sizes else 0.0
        return _line(sizes).of(num_tokens)

    def _known(self, *, with_prompts: bool) -> list[_Size]:
        self._sizes = {k: s for k, s in self._sizes.items() if self._num_steps - s.last < _STALE_STEPS}
        return [s for (prompts, _), s in self._sizes.items() if s.count >= _FEWEST and (with_prompts or not prompts)]


def quick(known: float, seconds: float) -> float:
    """Returns what something takes where nothing gets in its way: a shorter time is taken as it is, a longer one moves
    it a little."""
    return min(seconds, known + _UP * (seconds - known))


def _line(sizes: Sequence[_Size]) -> StepTime:
    """Returns the least squares line through two sizes or more, not falling and not starting below 0."""
    points = [(min(s.count, 20), s.num_tokens, s.seconds) for s in sizes]
    total = sum(weight for weight, _, _ in points)
    mean_n = sum(weight * n for weight, n, _ in points) / total
    mean_t = sum(weight * t for weight, _, t in points) / total
    variance = sum(weight * (n - mean_n) ** 2 for weight, n, _ in points)
    covariance = sum(weight * (n - mean_n) * (t - mean_t) for weight, n, t in points)
    slope = min(max(covariance / variance, 0.0), mean_t / mean_n) if variance else 0.0
    return StepTime(mean_t - slope * mean_n, slope)
