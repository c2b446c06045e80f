"""Whether a deadline can be met at all, told before the work starts. Pure: measured times are passed in."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepCosts:
    """How long steps take: seconds = fixed_s + per_token_s * tokens, fitted with the past fading out.

    The line is the least squares one over all steps seen, where a step counts `DECAY` of what the next one does.
    """

    weight: float = 0.0
    sum_tokens: float = 0.0
    sum_seconds: float = 0.0
    sum_tokens2: float = 0.0
    sum_tokens_seconds: float = 0.0

    DECAY = 0.99

    def observed(self, num_tokens: int, seconds: float) -> StepCosts:
        """Returns the times with one more step taken into account."""
        keep = self.DECAY
        return StepCosts(
            keep * self.weight + 1.0,
            keep * self.sum_tokens + num_tokens,
            keep * self.sum_seconds + seconds,
            keep * self.sum_tokens2 + num_tokens**2,
            keep * self.sum_tokens_seconds + num_tokens * seconds,
        )

    @property
    def per_token_s(self) -> float:
        """Seconds for one more token in a step, 0 or more."""
        if not self.weight:
            return 0.0
        variance = self.sum_tokens2 - self.sum_tokens**2 / self.weight
        if variance <= 1e-9 * max(1.0, self.sum_tokens2):
            return 0.0  # all steps were of one size: nothing is known of others
        return max(0.0, (self.sum_tokens_seconds - self.sum_tokens * self.sum_seconds / self.weight) / variance)

    def seconds(self, num_tokens: int) -> float:
        """Returns what a step with that many tokens takes; 0 where none was seen."""
        if not self.weight:
            return 0.0
        mean_tokens, mean_seconds = self.sum_tokens / self.weight, self.sum_seconds / self.weight
        return max(0.0, mean_seconds + self.per_token_s * (num_tokens - mean_tokens))


def earliest_finish_s(
    times: StepCosts, num_tokens_before: int, num_output_tokens: int, max_num_batched_tokens: int
) -> float:
    """Returns the seconds from now until an answer can be there at the earliest.

    Args:
        num_tokens_before: uncomputed tokens of the request and of all that are served before it.
        num_output_tokens: the fewest tokens that the answer can have.
        max_num_batched_tokens: of a step.

    The prompts ahead fill whole steps; after them each token of the answer takes a step that is as short as steps get.
    A lower bound: preemptions, other decodes and later arrivals are left out, so nobody is refused who could be served.
    """
    full_steps, rest = divmod(num_tokens_before, max_num_batched_tokens)
    prefill_s = full_steps * times.seconds(max_num_batched_tokens) + (times.seconds(rest) if rest else 0.0)
    return prefill_s + max(0, num_output_tokens - 1) * times.seconds(1)
