"""Whether and when a call that failed is made again. Pure but for the clock and the random numbers that it is given."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from clients.errors import ClientClosed, ClientError, DeadlineExceeded, InputError, ServerError, ServerUnavailable

_UNAVAILABLE = ("UNAVAILABLE", "503")
_RESERVE = 10.0
_EARNED = 0.1


@dataclass(frozen=True)
class RetryPolicy:
    """When a call that failed is made again, within its own time limit.

    A request that never reached the server is: the connection was refused. A question that changes nothing (metadata,
    config, statistics) is, also where the server died over it or is not ready yet. An inference that the server may
    have begun is only with `resend`: right for models without a state. What the server refused, a time limit that
    passed, and an answer of which a part has come, never are.

    Attributes:
        attempts: how often in all; 1 is never again.
        first_s, longest_s: the wait before the second attempt, doubled for each further one up to the longest. Of each
            a random part of up to half is left out, so that many clients do not come back at once.
        resend: inferences too, which the server may have begun.
    """

    attempts: int = 4
    first_s: float = 0.1
    longest_s: float = 2.0
    resend: bool = False

    def __post_init__(self) -> None:
        if self.attempts < 1 or not 0 <= self.first_s <= self.longest_s:
            raise InputError(f"{self} is not allowed: attempts of 1 or more, and 0 <= first_s <= longest_s")

    def wait_s(self, retry: int, fraction: float) -> float:
        """Seconds before retry number `retry`, the first is 0; `fraction` is random, from 0 to 1."""
        wait = min(self.longest_s, self.first_s * 2.0 ** min(retry, 60))
        return wait * (1 - fraction / 2)

    def allows(self, error: ClientError, *, repeatable: bool) -> bool:
        """Whether what failed with `error` may be done again at all."""
        if isinstance(error, ServerUnavailable):
            return not isinstance(error, ClientClosed) and (repeatable or self.resend or not error.sent)
        said_unavailable = type(error) is ServerError and error.status in _UNAVAILABLE
        return said_unavailable and (repeatable or self.resend)


NO_RETRIES = RetryPolicy(attempts=1)


class RetryBudget:
    """Ten retries, and one more for each ten calls that worked: a server that is down gets no storm on top.

    Shared by all calls of a client, from any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left = _RESERVE

    def earn(self) -> None:
        if self._left < _RESERVE:
            with self._lock:
                self._left = min(_RESERVE, self._left + _EARNED)

    def spend(self) -> bool:
        """Takes one retry; False where none is left."""
        with self._lock:
            if self._left < 1:
                return False
            self._left -= 1
            return True


class Attempts:
    """The attempts of one call.

    Args:
        timeout_s: for all of them together, waits included.
        clock, fraction: time in seconds; random numbers from 0 to 1.
    """

    def __init__(
        self,
        policy: RetryPolicy,
        budget: RetryBudget,
        timeout_s: float,
        *,
        repeatable: bool,
        clock: Callable[[], float] = time.monotonic,
        fraction: Callable[[], float] = random.random,
    ) -> None:
        self._policy = policy
        self._budget = budget
        self._repeatable = repeatable
        self._clock = clock
        self._fraction = fraction
        self._end = clock() + timeout_s
        self._retries = 0

    @property
    def left_s(self) -> float:
        """Seconds until the call's time limit."""
        return max(0.0, self._end - self._clock())

    def next_s(self) -> float:
        """Seconds that the next attempt may take; never 0, which sockets and aiohttp take for something else.

        Raises:
            DeadlineExceeded: none are left; the attempt is not made.
        """
        left_s = self.left_s
        if left_s <= 0:
            raise DeadlineExceeded("DEADLINE_EXCEEDED", "the time limit passed before the request was sent")
        return left_s

    def succeeded(self) -> None:
        """The call worked."""
        self._budget.earn()

    def wait_s(self, error: ClientError) -> float:
        """Seconds to wait before the call is made again; raises `error` where it is not."""
        wait = self._policy.wait_s(self._retries, self._fraction())
        self._retries += 1
        if (
            self._retries >= self._policy.attempts
            or not self._policy.allows(error, repeatable=self._repeatable)
            or wait >= self.left_s
            or not self._budget.spend()
        ):
            raise error
        return wait
