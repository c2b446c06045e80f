"""Whether a deadline can be met at all, told before the work starts. Pure: measured times are passed in."""

from __future__ import annotations

from backends.llm.engine.request import Request
from backends.llm.engine.scheduler import Scheduler
from backends.llm.errors import RequestRefused
from backends.llm.sampling.step_times import StepTimes


def check_deadline(request: Request, deadline_ms: float, scheduler: Scheduler, times: StepTimes) -> None:
    """Refuses a request whose answer cannot be there in time.

    Args:
        request: not added to the scheduler yet.
        deadline_ms: from now, until the whole answer is there.
        times: of the steps so far.

    Raises:
        RequestRefused: with the time that it takes at the least.
    """
    least = request.max_output_tokens if not request.stop_token_ids else max(1, request.min_output_tokens)
    room = scheduler.max_model_len - request.num_prompt_tokens
    needed_s = earliest_finish_s(
        times, scheduler.num_tokens_before(request), min(least, room), scheduler.config.max_num_batched_tokens
    )
    if needed_s * 1e3 > deadline_ms:
        raise RequestRefused(
            f"the deadline is in {deadline_ms:.0f} ms, the answer can be there in {needed_s * 1e3:.0f} ms at the "
            "earliest",
            "deadline",
        )


def earliest_finish_s(
    times: StepTimes, num_tokens_before: int, num_output_tokens: int, max_num_batched_tokens: int
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
