"""Speculator: asks for drafts where they pay, and learns from what becomes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from backends.llm.engine.outputs import RequestId
from backends.llm.engine.sequences import Sequence
from backends.llm.sampling.proposer import NO_DRAFT, Proposer
from backends.llm.sampling.speculation import SpeculationController
from backends.llm.sampling.step_times import StepTimes


class Speculator:
    """Follows the sequences of an engine from their first token to their last.

    Args:
        proposer: where drafts come from.
        max_drafts: draft tokens that one request gets in one step at the most.
        times: of the engine's steps.
        clock_ns: what proposing takes is timed, for a draft model's steps count too.
    """

    def __init__(self, proposer: Proposer, max_drafts: int, times: StepTimes, clock_ns: Callable[[], int]) -> None:
        self._proposer = proposer
        self._clock_ns = clock_ns
        self.controller = SpeculationController(max_drafts, times)
        self._known: set[RequestId] = set()

    def advanced(self, sequence: Sequence, num_accepted: int) -> None:
        """Takes what a step added to an answer, and what became of its draft."""
        request = sequence.request
        if request.request_id not in self._known:
            self._known.add(request.request_id)
            self._proposer.add(request.request_id, request.prompt_token_ids)
            new = request.token_ids[request.num_prompt_tokens :]
        else:
            self.controller.record(request.request_id, len(sequence.draft.token_ids), num_accepted)
            new = sequence.answer.token_ids[-1 - num_accepted :]
        self._proposer.append(request.request_id, new)
        sequence.draft = NO_DRAFT

    def propose(self, decoding: Iterable[RequestId], sequences: Mapping[RequestId, Sequence]) -> None:
        """Gives each of the sequences that decode its draft for the next step, an empty one where it does not pay."""
        known = [request_id for request_id in decoding if request_id in self._known]
        plan = self.controller.plan(known)
        started_ns = self._clock_ns()
        drafts = self._proposer.propose(plan)
        seconds = (self._clock_ns() - started_ns) / 1e9
        self.controller.observe_proposal(sum(len(draft.token_ids) for draft in drafts.values()), seconds)
        for request_id, draft in drafts.items():
            sequence = sequences[request_id]
            matcher = sequence.sampler.matcher
            # What the grammar does not allow is not worth its time in the step.
            sequence.draft = draft if matcher is None else draft.first(matcher.num_allowed(draft.token_ids))

    def remove(self, request_id: RequestId) -> None:
        """Forgets a sequence."""
        self._known.discard(request_id)
        self._proposer.remove(request_id)
        self.controller.remove(request_id)

    def close(self) -> None:
        """Frees the proposer."""
        self._proposer.close()
