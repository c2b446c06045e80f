"""When something that died is started again, and when no more. Pure: time is passed in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

WINDOW_S = 60.0
# Who dies this soon after being ready has most likely done nothing else: starting it again at once would be a loop.
QUICK_S = 2.0
_FIRST_DELAY_S = 0.5
_LONGEST_DELAY_S = 8.0


@dataclass(frozen=True)
class Death:
    """One end of a model's process or of the server.

    Attributes:
        at_s: when.
        lived_s: for how long it had been ready.
    """

    at_s: float
    lived_s: float


@dataclass(frozen=True)
class RestartPolicy:
    """Restarts at once, later where deaths follow upon starts, and not where there are too many.

    Attributes:
        max_restarts: within `WINDOW_S`; 0 is never.
    """

    max_restarts: int = 5

    def delay_s(self, deaths: Sequence[Death]) -> float | None:
        """Returns how long to wait before the next start, or None where it is given up.

        Args:
            deaths: all so far, the last one is the one to be answered.
        """
        last = deaths[-1]
        if sum(last.at_s - death.at_s < WINDOW_S for death in deaths) > self.max_restarts:
            return None
        quick = 0
        for death in reversed(deaths):
            if death.lived_s >= QUICK_S:
                break
            quick += 1
        return min(_FIRST_DELAY_S * 2 ** (quick - 1), _LONGEST_DELAY_S) if quick else 0.0
