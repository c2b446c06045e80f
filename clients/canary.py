"""`VersionSplit`: which share of requests goes to which version of a model. Pure."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from clients.errors import InputError

_RANGE = 2**64


@dataclass(frozen=True)
class VersionSplit:
    """Versions and their shares: `VersionSplit({"1": 95, "2": 5})` sends 5% to version 2.

    The same seed gives the same choices, in any process. A key (a user, a session) always gets the same version; where
    the share of the newer of two versions grows, no key leaves it.

    Attributes:
        weights: shares by version; they need not add up to 1 or 100.
        seed: another one sends other keys to the canary.

    Raises:
        InputError: no versions, one that is no number, or shares that are none.
    """

    weights: Mapping[str, float]
    seed: int = 0
    _turns: Iterator[int] = field(default_factory=itertools.count, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for version, weight in self.weights.items():
            if not (isinstance(version, str) and version.isascii() and version.isdigit()):
                raise InputError(f"the version {version!r} is not allowed; versions are numbers as text, such as '1'")
            if not (isinstance(weight, (int, float)) and math.isfinite(weight) and weight >= 0):
                raise InputError(f"the weight of version {version} is {weight!r}; allowed: a number of 0 or more")
        if not sum(self.weights.values()) > 0:
            raise InputError(f"the weights {dict(self.weights)} leave no version; one must be more than 0")
        object.__setattr__(self, "weights", dict(sorted(self.weights.items(), key=lambda item: int(item[0]))))

    def choose(self, key: str | None = None) -> str:
        """A version: the key's, or without one that of the next turn."""
        drawn = f"key {key}" if key is not None else f"turn {next(self._turns)}"
        digest = hashlib.blake2b(f"{self.seed} {drawn}".encode(), digest_size=8).digest()
        point = int.from_bytes(digest, "little") / _RANGE * sum(self.weights.values())
        reached, chosen = 0.0, ""
        for version, weight in self.weights.items():
            if weight > 0 and (not chosen or point >= reached):  # the last one, where rounding leaves the point beyond
                chosen = version
            reached += weight
        return chosen
