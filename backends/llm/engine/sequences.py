"""One request of a user, and the n answers that it is computed as."""

from __future__ import annotations

from dataclasses import dataclass, field

from backends.llm.engine.outputs import RequestId
from backends.llm.engine.request import Request
from backends.llm.engine.results import Completion, GenerateOutput, StepOutput
from backends.llm.sampling.answer import Answer, AnswerDelta, Usage
from backends.llm.sampling.logprobs import TokenLogprobs
from backends.llm.sampling.params import SamplingParams
from backends.llm.sampling.proposer import NO_DRAFT, Draft
from backends.llm.sampling.state import SamplerState


@dataclass(eq=False, slots=True)
class Sequence:
    """One answer.

    Attributes:
        draft: what was proposed for its next tokens.
    """

    group: Group
    index: int
    request: Request
    sampler: SamplerState
    answer: Answer
    draft: Draft = NO_DRAFT
    error: str = ""
    error_param: str = ""

    @property
    def request_id(self) -> RequestId:
        return self.request.request_id

    @property
    def usage(self) -> Usage:
        return self.answer.usage(self.request.num_prompt_tokens, self.request.num_cached_tokens or 0)

    def output(self, delta: AnswerDelta, *, is_last: bool = False) -> StepOutput:
        """Returns what a step added to this answer; with the request's last output come its prompt's probabilities."""
        logprobs = self.group.prompt_logprobs if is_last else None
        return StepOutput(
            self.group.request_id,
            self.index,
            delta,
            self.usage,
            is_last,
            None if logprobs is None else tuple(logprobs),
            self.error,
            self.request.scheduled_ns,
            self.request.num_preemptions,
            self.error_param,
        )

    def completion(self) -> Completion:
        """Returns the whole answer, which must have ended."""
        answer = self.answer
        assert answer.finish_reason is not None
        return Completion(
            index=self.index,
            text=answer.text,
            token_ids=tuple(answer.token_ids),
            finish_reason=answer.finish_reason.value,
            stop_reason=answer.stop_reason,
            cumulative_logprob=answer.cumulative_logprob,
            logprobs=None if answer.logprobs is None else tuple(answer.logprobs),
            error=self.error,
        )


@dataclass(eq=False, slots=True)
class Group:
    """One request.

    Attributes:
        sequences: its answers. The others start when the first has computed the prompt, and find it in the cache.
        held: answers that have not started.
        prompt_logprobs: of the prompt's tokens after the first, as far as they are computed.
        deadline_ns: when the whole answer must be there, on the engine's clock.
    """

    request_id: str
    params: SamplingParams
    sequences: list[Sequence] = field(default_factory=list)
    held: list[Sequence] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] | None = None
    deadline_ns: int | None = None

    @property
    def has_ended(self) -> bool:
        return all(sequence.answer.finish_reason is not None for sequence in self.sequences)

    def result(self) -> GenerateOutput:
        """Returns all answers; they must have ended."""
        first = self.sequences[0]
        return GenerateOutput(
            request_id=self.request_id,
            prompt_token_ids=first.request.prompt_token_ids,
            outputs=tuple(sequence.completion() for sequence in self.sequences),
            usage=Usage(
                first.usage.num_prompt_tokens,
                first.usage.num_cached_tokens,
                sum(sequence.usage.num_output_tokens for sequence in self.sequences),
            ),
            prompt_logprobs=None if self.prompt_logprobs is None else tuple(self.prompt_logprobs),
        )
