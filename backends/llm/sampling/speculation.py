"""How many draft tokens each request gets: as many as pay for themselves by what was measured, or none. Pure.

A step of n tokens takes fixed + per_token * n seconds. The j-th draft token of a request is part of the answer with
probability rate ** j, and costs per_token. A step gives `num_requests + sum(rate ** j)` tokens on average; tokens per
second are the highest where exactly those drafts are computed whose rate ** j exceeds per_token * (tokens per second).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from backends.llm.engine.outputs import RequestId
from backends.llm.sampling.step_times import StepTime, StepTimes, quick

_BENEFIT_OF_DOUBT = 0.5  # a request of which nothing is known counts as this many tokens that were all accepted
_MEMORY = 0.95  # what a step leaves of what was known: about 20 steps count
_IDLE_MEMORY = 0.99  # the same for a step without drafts, so that a request that got none is tried again


def plan_drafts(
    acceptance_rates: Sequence[float], max_drafts: Sequence[int], step_time: StepTime, *, draft_token_s: float = 0.0
) -> list[int]:
    """Returns how many draft tokens each of the running requests should get, for the most tokens per second.

    The fraction tokens / time is maximised by Dinkelbach's method: the best drafts for a rate of tokens per second give
    a higher rate, until it stays; a few rounds are enough.

    Args:
        acceptance_rates: for each running request, in [0, 1]: the chance that a draft token is accepted if those
            before it were.
        max_drafts: for each of them.
        step_time: as measured.
        draft_token_s: what proposing one draft token takes, in seconds.
    """
    num_requests = len(acceptance_rates)
    cost = step_time.per_token_s + draft_token_s
    plan = [0] * num_requests
    tokens_per_s = num_requests / step_time.of(num_requests) if num_requests else 0.0
    for _ in range(8):
        least = cost * tokens_per_s
        better = [_worth(rate, least, most) for rate, most in zip(acceptance_rates, max_drafts, strict=True)]
        if better == plan:
            break
        plan = better
        gained = sum(_expected(rate, count) for rate, count in zip(acceptance_rates, plan, strict=True))
        tokens_per_s = (num_requests + gained) / (step_time.of(num_requests) + cost * sum(plan))
    return plan


def _worth(rate: float, least: float, max_drafts: int) -> int:
    """Returns how many of rate, rate ** 2, ... are above `least`."""
    if rate <= least:
        return 0
    if least <= 0 or rate >= 1:
        return max_drafts
    return min(max_drafts, math.ceil(math.log(least) / math.log(rate)) - 1)


def _expected(rate: float, num_drafts: int) -> float:
    """Returns how many of the drafts are accepted on average: rate + rate ** 2 + ..."""
    return float(num_drafts) if rate >= 1 else rate * (1 - rate**num_drafts) / (1 - rate)


class AcceptanceRate:
    """The chance that a request's draft token is accepted if those before it were, from its last steps."""

    def __init__(self) -> None:
        self._judged = self._accepted = 0.0

    def record(self, num_drafts: int, num_accepted: int) -> None:
        """Takes one step; of the drafts behind the first that was rejected nothing is known."""
        memory = _MEMORY if num_drafts else _IDLE_MEMORY
        self._judged = self._judged * memory + min(num_accepted + 1, num_drafts)
        self._accepted = self._accepted * memory + num_accepted

    @property
    def rate(self) -> float:
        """Hopeful where little is known, for what is never tried is never learned."""
        return (self._accepted + _BENEFIT_OF_DOUBT) / (self._judged + _BENEFIT_OF_DOUBT)

    @property
    def most_drafts(self) -> int:
        """How many drafts may be staked on it: one more than lately came true."""
        return 1 + int(self._accepted)


class SpeculationController:
    """Watches drafts and step times, and says how many draft tokens the next step should have.

    Args:
        max_drafts: of one request in one step.
        times: of the steps, kept up by whoever runs them.

    Attributes:
        num_drafts, num_accepted: draft tokens since the start; their ratio is the acceptance rate that is reported.
        num_proposals: how often a request had any in a step.
    """

    def __init__(self, max_drafts: int, times: StepTimes) -> None:
        self.num_drafts = 0
        self.num_accepted = 0
        self.num_proposals = 0
        self._max_drafts = max_drafts
        self._draft_token_s = 0.0
        self._times = times
        self._num_plans = 0
        self._rates: dict[RequestId, AcceptanceRate] = {}

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted draft tokens of all that were verified; None before the first."""
        return self.num_accepted / self.num_drafts if self.num_drafts else None

    def plan(self, request_ids: Sequence[RequestId]) -> dict[RequestId, int]:
        """Returns how many draft tokens each of the requests that decode should get; 0 where they do not pay."""
        known = [self._rates.setdefault(request_id, AcceptanceRate()) for request_id in request_ids]
        most = [min(self._max_drafts, rate.most_drafts) for rate in known]
        step_time = self._times.fit()
        self._num_plans += 1
        if step_time is None:  # steps with and without drafts in turn, until there are sizes to compare
            counts = most if self._num_plans % 2 == 0 else [0] * len(most)
        else:
            counts = plan_drafts([r.rate for r in known], most, step_time, draft_token_s=self._draft_token_s)
        return dict(zip(request_ids, counts, strict=True))

    def record(self, request_id: RequestId, num_drafts: int, num_accepted: int) -> None:
        """Takes what a step did with a request's draft, an empty one too."""
        self.num_drafts += num_drafts
        self.num_proposals += num_drafts > 0
        self.num_accepted += num_accepted
        self._rates.setdefault(request_id, AcceptanceRate()).record(num_drafts, num_accepted)

    def observe_proposal(self, num_tokens: int, seconds: float) -> None:
        """Takes the time in which so many draft tokens were proposed; as of steps, the quick ones count."""
        if num_tokens:
            each = seconds / num_tokens
            self._draft_token_s = quick(self._draft_token_s, each) if self._draft_token_s else each

    def remove(self, request_id: RequestId) -> None:
        """Forgets a request, also one that is not known."""
        self._rates.pop(request_id, None)
