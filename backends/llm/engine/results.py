"""What the engine hands back: per step what is new, and in the end whole answers."""

from __future__ import annotations

from dataclasses import dataclass

from backends.llm.engine.outputs import SchedulerStats
from backends.llm.sampling.answer import AnswerDelta, Usage
from backends.llm.sampling.logprobs import TokenLogprobs


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step adds to one answer of one request.

    Attributes:
        request_id: as it was given to `add_request`.
        index: which of the request's n answers.
        prompt_logprobs: with the last output of the request, where it asked for them.
        is_last: nothing more comes for this request.
        error: why the answer failed, where `delta.finish_reason` is ERROR.
        scheduled_ns: when the answer was first given a place in a step, on the engine's clock; None before that.
        num_preemptions: of the answer so far.
        error_param: the request's field that it failed for, empty where it was not the request's fault.
    """

    request_id: str
    index: int
    delta: AnswerDelta
    usage: Usage
    is_last: bool
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    error: str = ""
    scheduled_ns: int | None = None
    num_preemptions: int = 0
    error_param: str = ""


@dataclass(frozen=True, slots=True)
class Completion:
    """One whole answer; `finish_reason` is "stop", "length", "abort", "deadline" or "error"."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stop_reason: int | str | None
    cumulative_logprob: float
    logprobs: tuple[TokenLogprobs, ...] | None
    error: str


@dataclass(frozen=True, slots=True)
class GenerateOutput:
    """The answers to one prompt.

    Attributes:
        outputs: one for each of `params.n`.
        prompt_logprobs: for each prompt token after the first, where they were asked for.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[Completion, ...]
    usage: Usage
    prompt_logprobs: tuple[TokenLogprobs, ...] | None


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since the start, and what is there now.

    Attributes:
        num_computed_tokens: positions that the model computed, recomputed and rejected ones included.
        num_output_tokens: tokens of answers.
        num_draft_tokens, num_accepted_tokens: of speculation.
        num_drafts: how often a request had draft tokens in a step.
        num_masks, mask_seconds: rows of logits that a grammar masked, and the time that computing the masks took.
    """

    scheduler: SchedulerStats
    num_steps: int
    num_computed_tokens: int
    num_output_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_drafts: int = 0
    num_masks: int = 0
    mask_seconds: float = 0.0

    @property
    def acceptance_rate(self) -> float | None:
        """Share of the draft tokens that were accepted; None where there were none."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None
