"""When requests are sent: the offered load, as a closed or an open loop. Pure: it waits for nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from perf.errors import UsageError

DISTRIBUTIONS = ("constant", "poisson", "gamma")

_CHUNK = 1024  # gaps drawn at a time: one numpy call for many requests


@dataclass(frozen=True)
class ClosedLoop:
    """`concurrency` callers, each sending its next request when the last one has been answered."""

    concurrency: int

    mode = "closed"

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise UsageError(f"concurrency is {self.concurrency}; it must be at least 1")

    @property
    def level(self) -> float:
        """The number that a report orders its rows by."""
        return float(self.concurrency)

    def __str__(self) -> str:
        return f"concurrency {self.concurrency}"


@dataclass(frozen=True)
class OpenLoop:
    """Requests at `rate_per_s`, whether the server keeps up or not.

    Attributes:
        rate_per_s: mean arrivals per second.
        distribution: "constant" gaps; "poisson" arrivals; "gamma" gaps, bursty below a burstiness of 1.
        burstiness: shape of the gamma distribution; 1 is poisson. Used with "gamma" only.
        seed: the same seed gives the same arrivals.
    """

    rate_per_s: float
    distribution: str = "constant"
    burstiness: float = 1.0
    seed: int = 0

    mode = "open"

    def __post_init__(self) -> None:
        if not 0 < self.rate_per_s < float("inf"):
            raise UsageError(f"request rate is {self.rate_per_s:g}/s; it must be above 0")
        if self.distribution not in DISTRIBUTIONS:
            allowed = ", ".join(DISTRIBUTIONS)
            raise UsageError(f"request distribution is {self.distribution!r}; allowed: {allowed}")
        if not 0 < self.burstiness < float("inf"):
            raise UsageError(f"burstiness is {self.burstiness:g}; it must be above 0 (1 is poisson)")

    @property
    def level(self) -> float:
        """The number that a report orders its rows by."""
        return self.rate_per_s

    @property
    def coefficient_of_variation(self) -> float:
        """Standard deviation of the gaps / their mean: 0 constant, 1 poisson, 1/sqrt(burstiness) gamma."""
        if self.distribution == "constant":
            return 0.0
        return 1.0 / float(np.sqrt(self._shape))

    def gaps_s(self) -> Iterator[float]:
        """Seconds between one arrival and the next, without end.

        gamma(shape=burstiness, scale=1/(rate * burstiness)) has the mean 1/rate for every burstiness.
        """
        if self.distribution == "constant":
            yield from itertools.repeat(1.0 / self.rate_per_s)
        generator = np.random.default_rng(self.seed)
        scale = 1.0 / (self.rate_per_s * self._shape)
        while True:
            yield from generator.gamma(self._shape, scale, size=_CHUNK).tolist()

    @property
    def _shape(self) -> float:
        return self.burstiness if self.distribution == "gamma" else 1.0

    def __str__(self) -> str:
        return f"{self.rate_per_s:g} requests/s, {self.distribution}"


Arrivals = ClosedLoop | OpenLoop


def parse_range(text: str, *, whole: bool) -> tuple[float, ...]:
    """The levels that `start:end:step` names, or several such after commas; the end is included when a step hits it.

    `step` is added, as in perf_analyzer; written `xK` it multiplies: "1:16:x4" is 1, 4, 16.

    Args:
        text: "4", "1:4", "1:16:x4" or "1,8,32".
        whole: levels must be whole numbers (concurrency).

    Raises:
        UsageError: the range cannot be read, is empty or never ends.
    """
    levels = [level for part in text.split(",") for level in _parse_one_range(part, text, whole=whole)]
    if len(levels) > _MOST_LEVELS or len(set(levels)) < len(levels):
        raise UsageError(f"range {text!r} names a level twice, or more than {_MOST_LEVELS} levels")
    return tuple(levels)


def _parse_one_range(one: str, text: str, *, whole: bool) -> tuple[float, ...]:
    wanted = "start[:end[:step]], with a step like 4 (added) or x2 (multiplied), or a list: 8, 1:8, 1:16:x4, 1,8,32"
    parts = one.split(":")
    if not 1 <= len(parts) <= 3:
        raise UsageError(f"range {text!r} has {len(parts)} parts; write {wanted}")
    step_text = parts[2] if len(parts) == 3 else "1"
    multiplied = step_text.startswith("x")
    try:
        start, end = float(parts[0]), float(parts[1] if len(parts) > 1 else parts[0])
        step = float(step_text.removeprefix("x"))
    except ValueError as error:
        raise UsageError(f"range {text!r} holds something that is not a number; write {wanted}") from error
    if not all(np.isfinite([start, end, step])) or start <= 0 or end < start:
        raise UsageError(f"range {text!r} must go from a number above 0 up to one at least as large; write {wanted}")
    if step <= (1 if multiplied else 0):
        least = "above x1" if multiplied else "above 0"
        raise UsageError(f"range {text!r} has the step {step_text}, which never reaches its end; it must be {least}")
    if whole and not all(number.is_integer() for number in (start, end, step)):
        raise UsageError(f"range {text!r} must hold whole numbers; write {wanted}")
    levels: list[float] = []
    level = start
    while level <= end * (1 + 1e-9) and len(levels) <= _MOST_LEVELS:
        levels.append(level)
        # start + n * step, not a running sum: 0.1 + 0.1 + 0.1 would miss 0.3
        level = start * step ** len(levels) if multiplied else start + step * len(levels)
    if len(levels) > _MOST_LEVELS:
        raise UsageError(f"range {text!r} names more than {_MOST_LEVELS} levels; choose a larger step")
    return tuple(levels)


_MOST_LEVELS = 100
