"""LiveRequests: the requests that have not ended. How their answers start, get their tokens and end."""

from __future__ import annotations

import heapq

from backends.llm.engine.outputs import RequestId, RequestUpdate
from backends.llm.engine.request import FinishReason
from backends.llm.engine.results import StepOutput
from backends.llm.engine.scheduler import Scheduler
from backends.llm.engine.sequences import Group, Sequence
from backends.llm.engine.speculator import Speculator
from backends.llm.sampling.answer import AnswerDelta
from backends.llm.sampling.sampler import Sampled


class LiveRequests:
    """The books of the engine; the scheduler and the speculator hear of each answer from here.

    Args:
        speculator: None where nothing is proposed.

    Attributes:
        groups: the requests, by the ids that their users gave.
        sequences: their answers that have started and not ended, by the scheduler's ids.
        num_output_tokens: of all answers since the start, ended ones included.
    """

    def __init__(self, scheduler: Scheduler, speculator: Speculator | None) -> None:
        self._scheduler = scheduler
        self._speculator = speculator
        self.groups: dict[str, Group] = {}
        self.sequences: dict[RequestId, Sequence] = {}
        self.num_output_tokens = 0
        self._deadlines: list[tuple[int, str]] = []  # a heap of (deadline_ns, id of the request)

    def start(self, group: Group) -> None:
        """Takes a request in. Its first answer starts; the others are held until that has computed the prompt.

        Raises:
            RequestRefused: by the scheduler; nothing has changed then.
        """
        first, *others = group.sequences
        self._scheduler.add_request(first.request)
        group.held = others
        self.groups[group.request_id] = group
        self.sequences[first.request_id] = first
        if group.deadline_ns is not None:
            heapq.heappush(self._deadlines, (group.deadline_ns, group.request_id))
            # Those that ended in time are as many as living ones at most: a deadline may be a day away.
            if len(self._deadlines) > 2 * len(self.groups) + 16:
                self._deadlines = [(g.deadline_ns, i) for i, g in self.groups.items() if g.deadline_ns is not None]
                heapq.heapify(self._deadlines)

    def advance(self, update: RequestUpdate, sampled: Sampled) -> StepOutput:
        """Brings an answer up to date with the tokens of a step."""
        sequence = self.sequences[update.request.request_id]
        self._start_held(sequence.group)
        # Drafts may have gone beyond the token that ends the answer for the scheduler.
        is_complete = sampled.is_complete and len(update.new_token_ids) == len(sampled.token_ids)
        delta = sequence.answer.add(
            update.new_token_ids, sampled.logprobs, update.request.finish_reason, is_complete=is_complete
        )
        if self._speculator:
            self._speculator.advanced(sequence, update.num_accepted_drafts)
        self.num_output_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            self._scheduler.finish(sequence.request_id, delta.finish_reason)
            return self._ended(sequence, delta)
        return sequence.output(delta)

    def propose_drafts(self) -> None:
        """Proposes drafts for the next step, where there is a speculator."""
        if not self._speculator:
            return
        decoding = [r.request_id for r in self._scheduler.running if r.num_uncomputed_tokens == 1]
        self._speculator.propose(decoding, self.sequences)
        for request_id in decoding:
            self._scheduler.set_drafts(request_id, self.sequences[request_id].draft.token_ids)

    def fail(self, request_id: RequestId, error: Exception) -> list[StepOutput]:
        """Ends an answer, and those that wait for its prompt, with an error; no other request is touched."""
        sequence = self.sequences[request_id]
        failed = [sequence, *sequence.group.held]
        sequence.group.held = []
        outputs = []
        for each in failed:
            each.error, each.error_param = str(error), getattr(error, "param", "")
            self._scheduler.finish(each.request_id, FinishReason.ERROR)
            outputs.append(self._ended(each, each.answer.finish(FinishReason.ERROR)))
        return outputs

    def end(self, group: Group, reason: FinishReason) -> list[StepOutput]:
        """Ends all answers of a request that have not ended."""
        outputs = []
        group.held = []
        for sequence in group.sequences:
            if sequence.answer.finish_reason is None:
                self._scheduler.finish(sequence.request_id, reason)
                outputs.append(self._ended(sequence, sequence.answer.finish(reason)))
        return outputs

    def end_late(self, now_ns: int) -> list[StepOutput]:
        """Ends the requests whose deadlines have passed."""
        outputs: list[StepOutput] = []
        while self._deadlines and self._deadlines[0][0] <= now_ns:
            deadline_ns, request_id = heapq.heappop(self._deadlines)
            group = self.groups.get(request_id)
            # Where it ended in time, its id may be that of another request by now.
            if group is not None and group.deadline_ns == deadline_ns:
                outputs += self.end(group, FinishReason.DEADLINE)
        return outputs

    def _start_held(self, group: Group) -> None:
        """Starts the other answers of a request, now that the first has computed the prompt."""
        for sequence in group.held:
            self._scheduler.add_request(sequence.request, limited=False)  # the request was taken with all its answers
            self.sequences[sequence.request_id] = sequence
        group.held = []

    def _ended(self, sequence: Sequence, delta: AnswerDelta) -> StepOutput:
        """Forgets an answer, and its request with the last one."""
        group = sequence.group
        self.sequences.pop(sequence.request_id, None)
        if self._speculator:
            self._speculator.remove(sequence.request_id)
        is_last = group.has_ended
        if is_last:
            del self.groups[group.request_id]
        return sequence.output(delta, is_last=is_last)
