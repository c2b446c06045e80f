"""How long prompts and answers are: a distribution read from text, and numbers drawn from it. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from perf.errors import UsageError

KINDS = {"fixed": 1, "uniform": 2, "lognormal": 2}  # and how many numbers each takes
LONGEST = 1_000_000


@dataclass(frozen=True)
class Lengths:
    """A distribution of whole numbers of tokens, each from 1 to `LONGEST`.

    Attributes:
        kind: "fixed" (a), "uniform" from a to b, both included, or "lognormal" with the mean a and the standard
            deviation b.
    """

    kind: str
    a: float
    b: float = 0.0

    def draw(self, rng: np.random.Generator) -> int:
        """One length."""
        if self.kind == "fixed":
            return int(self.a)
        if self.kind == "uniform":
            return int(rng.integers(int(self.a), int(self.b) + 1))
        # Of X = exp(N(m, s)): mean = exp(m + s^2 / 2), variance = (exp(s^2) - 1) mean^2.
        s2 = math.log1p((self.b / self.a) ** 2)
        drawn = rng.lognormal(math.log(self.a) - s2 / 2, math.sqrt(s2))
        return min(max(round(drawn), 1), LONGEST)

    def __str__(self) -> str:
        return f"{self.a:g}" if self.kind == "fixed" else f"{self.kind} {self.a:g}:{self.b:g}"


def parse_lengths(text: str, option: str) -> Lengths:
    """Lengths from "128", "uniform:16:256" or "lognormal:200:80".

    Raises:
        UsageError: it cannot be read or makes no sense; names `option`.
    """
    wanted = "N, uniform:LOW:HIGH or lognormal:MEAN:STDDEV, as in 128, uniform:16:256, lognormal:200:80"
    kind, *numbers = text.split(":") if ":" in text else ("fixed", text)
    if len(numbers) != KINDS.get(kind):
        raise UsageError(f"{option} is {text!r}; allowed: {wanted}")
    try:
        values = [float(number) for number in numbers]
    except ValueError as error:
        raise UsageError(f"{option} {text!r} holds something that is not a number; allowed: {wanted}") from error
    if not all(1 <= value <= LONGEST for value in (values if kind != "lognormal" else values[:1])):
        raise UsageError(f"{option} {text!r} is out of range; allowed: 1 to {LONGEST:,} tokens")
    if kind != "lognormal" and not all(value.is_integer() for value in values):
        raise UsageError(f"{option} {text!r} must hold whole numbers; allowed: {wanted}")
    if kind == "uniform" and values[1] < values[0]:
        raise UsageError(f"{option} {text!r} goes down; allowed: {wanted}")
    if kind == "lognormal" and not 0 < values[1] <= LONGEST:
        raise UsageError(f"{option} {text!r} has a standard deviation of {values[1]:g}; it must be above 0")
    return Lengths(kind, *values)
