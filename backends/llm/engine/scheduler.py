"""Scheduler: which tokens of which requests the next step computes.

There is no prefill and no decode phase. A request is behind by `num_uncomputed_tokens`; each step gives it tokens until
it is not, and then one more is sampled. Running decodes are behind by one, prompts by many, and a step mixes them:

    1. every running request that is behind by one gets it, with its draft tokens where there is room;
    2. short prompts that are under way, then the one long prompt, up to its share while others wait;
    3. new requests, in the policy's order, as long as tokens, places and blocks last;
    4. what is left goes to the long prompt.

When blocks run out, the running request that is last in the policy's order is preempted: its blocks are freed, and it
waits to be computed again, its answer so far included. The first in the order always gets on, since one request alone
always fits.

    add_request --> waiting --admitted (3)--> running --its answer ends, or finish--> gone
                       ^                         |
                       +--------preempted--------+
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from backends.llm.engine.config import SchedulerConfig
from backends.llm.engine.kv_cache_manager import KVCacheManager
from backends.llm.engine.outputs import RequestId, RequestUpdate, SchedulerOutput, SchedulerStats
from backends.llm.engine.policies import policy_named
from backends.llm.engine.request import FinishReason, Request
from backends.llm.engine.step import Step, scheduled_requests
from backends.llm.engine.waiting import StaticBatch, WaitingRequests
from backends.llm.errors import RequestRefused, check_prompt_length, too_many_wait


class Scheduler:
    """Puts steps together; owns all requests from `add_request` until they are finished.

    Args:
        config: the limits and the policy.
        kv_cache: the block tables; nobody else changes them.
    """

    def __init__(self, config: SchedulerConfig, kv_cache: KVCacheManager) -> None:
        self.config = config
        self.max_model_len = min(config.max_model_len, kv_cache.capacity_tokens)
        self._kv = kv_cache
        self._policy = policy_named(config.policy, lambda r: len(kv_cache.find_prefix(r)) * kv_cache.block_size)
        self._waiting = WaitingRequests(self._policy, self._is_long)
        self._running: dict[RequestId, Request] = {}
        self._requests: dict[RequestId, Request] = {}  # those that wait and those that run
        self._static = StaticBatch() if config.batching == "static" else None
        self._num_added = self._num_preemptions = self._num_prefix_queries = self._num_prefix_hits = 0

    @property
    def has_requests(self) -> bool:
        return bool(self._requests)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> Iterator[Request]:
        return iter(self._running.values())

    def add_request(self, request: Request, *, limited: bool = True) -> None:
        """Takes a request over; it waits for its first step. Its answer is cut where the context ends.

        Args:
            limited: `max_waiting` applies.

        Raises:
            RequestRefused: it can never fit, or too many wait.
        """
        if request.request_id in self._requests:
            raise RequestRefused(f"request id '{request.request_id}' is in use", "invalid")
        check_prompt_length(request.num_prompt_tokens, self.max_model_len)
        if limited:
            self._check_room()
        request.max_output_tokens = min(request.max_output_tokens, self.max_model_len - request.num_prompt_tokens)
        request.order = self._num_added
        self._num_added += 1
        self._requests[request.request_id] = request
        self._policy.added(request)
        self._waiting.push(request)

    def _check_room(self) -> None:
        limit = self.config.max_waiting
        # Those that find a free place wait for the next step and for nobody: an idle engine takes them all.
        free = max(0, self.config.max_num_seqs - len(self._running))
        if limit is not None and self.num_waiting >= limit + free:
            raise too_many_wait(self.num_waiting, limit, free)

    def schedule(self, now_ns: int = 0) -> SchedulerOutput:
        """Returns the next step, which begins now; an empty one where nothing can be done."""
        step = Step(self.config.max_num_batched_tokens, now_ns)
        prompts = self._schedule_decodes(step)
        long = self._schedule_prompts(prompts, step)
        if self.num_waiting and not step.preempted:
            long = self._admit_waiting(prompts, step) or long
        if long is not None:
            rest = long.num_uncomputed_tokens - step.num_tokens.get(long.request_id, 0)
            self._give_tokens(long, rest, step)
        for request_id, num_tokens in step.num_tokens.items():
            self._policy.charge(self._running[request_id], num_tokens)
        return SchedulerOutput(scheduled_requests(step, self._running, self._kv), tuple(step.preempted))

    def update_from_output(
        self, output: SchedulerOutput, sampled: Mapping[RequestId, Sequence[int]]
    ) -> list[RequestUpdate]:
        """Takes over what a step computed and sampled; requests that end here leave the scheduler.

        Args:
            output: the step, as `schedule` returned it.
            sampled: for each request with logits for a next token: the draft tokens that were accepted and one more.
                A request that was finished meanwhile is passed over.
        """
        updates = []
        for scheduled in output.requests:
            request = self._running.get(scheduled.request_id)
            if request is None:
                continue
            tokens = sampled.get(scheduled.request_id, ())
            num_accepted = len(tokens) - 1 if tokens else 0
            num_rejected = len(request.draft_token_ids) - num_accepted if tokens else 0
            # Keys and values of rejected drafts are left where they are; the next tokens overwrite them.
            request.num_computed_tokens += len(scheduled.token_ids) - num_rejected
            request.draft_token_ids = ()
            taken = request.append(tokens)
            self._kv.publish(request)
            if taken:
                updates.append(RequestUpdate(request, taken, min(len(taken), num_accepted)))
            if request.finish_reason is not None:
                self.finish(request.request_id, request.finish_reason)
        return updates

    def set_drafts(self, request_id: RequestId, token_ids: Sequence[int]) -> None:
        """Proposes the next tokens of a running request; those that its answer has no room for are left out."""
        request = self._running.get(request_id)
        if request is not None and request.num_uncomputed_tokens == 1:
            request.draft_token_ids = token_ids[: request.max_output_tokens - request.num_output_tokens - 1]

    def finish(self, request_id: RequestId, reason: FinishReason) -> Request | None:
        """Ends a request at once and frees its blocks; None where it is not here (any more)."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return None
        if self._running.pop(request_id, None) is not None:
            self._kv.free(request)
        else:
            self._waiting.remove(request)
        self._policy.removed(request)
        request.finish_reason = reason
        return request

    def num_tokens_before(self, request: Request) -> int:
        """Returns the uncomputed tokens of a new request and of all that are served before it."""
        rank = self._policy.rank(request)
        ahead = [*self._running.values(), *(r for r in self._waiting if self._policy.rank(r) < rank)]
        return request.num_uncomputed_tokens + sum(r.num_uncomputed_tokens for r in ahead)

    def stats(self) -> SchedulerStats:
        pool = self._kv.pool
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=self.num_waiting,
            num_blocks=pool.num_blocks,
            num_free_blocks=pool.num_free_blocks,
            num_cached_blocks=pool.num_cached_blocks,
            num_preemptions=self._num_preemptions,
            num_prefix_queries=self._num_prefix_queries,
            num_prefix_hits=self._num_prefix_hits,
        )

    def check_invariants(self) -> None:
        """Raises AssertionError where the books are wrong."""
        self._kv.check_invariants()
        waiting = {r.request_id for r in self._waiting}
        assert waiting.isdisjoint(self._running) and waiting | set(self._running) == set(self._requests)
        for request in self._running.values():
            num_blocks = self._kv.num_blocks_of(request.request_id)
            assert request.num_computed_tokens <= num_blocks * self._kv.block_size
            assert request.num_computed_tokens < request.num_tokens, "a running request has something to compute"
        assert all(self._kv.num_blocks_of(request_id) == 0 for request_id in waiting)
        assert len(self._running) <= self.config.max_num_seqs
        num_long = sum(r.num_uncomputed_tokens > 1 and self._is_long(r) for r in self._running.values())
        assert num_long <= 1, "long prompts are computed one at a time"

    def _schedule_decodes(self, step: Step) -> list[Request]:
        """Schedules all that are behind by one token; returns the others, in the policy's order."""
        prompts = []
        # Drafts share what is left when every running request has its one token.
        for_drafts = step.budget - len(self._running)
        for request in list(self._running.values()):
            if request.num_uncomputed_tokens > 1:
                prompts.append(request)
            elif request.request_id in self._running:  # not preempted by one before it
                request.draft_token_ids = request.draft_token_ids[: max(0, for_drafts)]
                for_drafts -= len(request.draft_token_ids)
                self._give_tokens(request, 1, step)
        return sorted((r for r in prompts if r.request_id in self._running), key=self._policy.rank)

    def _schedule_prompts(self, prompts: Sequence[Request], step: Step) -> Request | None:
        """Schedules the short prompts under way, then the share of the long one, which is returned."""
        long = None
        for request in prompts:
            if self._is_long(request):
                long = request
            else:
                self._give_tokens(request, request.num_uncomputed_tokens, step)
        if long is not None:
            others_wait = self.num_waiting > 0 or len(prompts) > 1
            share = self.config.long_prefill_tokens if others_wait else step.budget
            self._give_tokens(long, min(long.num_uncomputed_tokens, share), step)
        return long

    def _admit_waiting(self, prompts: Sequence[Request], step: Step) -> Request | None:
        """Starts waiting requests in the policy's order, as long as tokens, places and blocks last.

        Args:
            prompts: those under way. The blocks that they still need are not given away, and one block for each running
                request is kept: all that would end in a preemption.

        Returns:
            The long one among those that were started.
        """
        long = None
        take_long = not any(map(self._is_long, prompts))
        reserved = len(self._running) + sum(map(self._kv.num_missing_blocks, prompts))
        while step.budget > 0 and self._num_places() > 0:
            request = self._waiting.peek(take_long=take_long)
            if request is None:
                break
            prefix = self._kv.find_prefix(request)
            num_cached = len(prefix) * self._kv.block_size
            num_tokens = min(request.num_tokens - num_cached, step.room(request))
            if self._is_long(request) and self.num_waiting > 1:
                num_tokens = min(num_tokens, self.config.long_prefill_tokens)
            # Blocks for the part of its prompt that later steps compute.
            later = self._kv.num_blocks_for(request.num_tokens) - self._kv.num_blocks_for(num_cached + num_tokens)
            if not self._kv.admit(request, prefix, num_tokens, reserved + later):
                break
            self._start(request, num_cached, step.now_ns)
            step.take(request, num_tokens)
            reserved += later + 1
            if self._is_long(request):
                long, take_long = request, False
        return long

    def _num_places(self) -> int:
        """Returns how many more requests may start now."""
        free = self.config.max_num_seqs - len(self._running)
        return self._static.num_places(free, len(self._running), self.num_waiting) if self._static else free

    def _start(self, request: Request, num_cached: int, now_ns: int) -> None:
        """Moves a request that was admitted from the waiting to the running ones."""
        self._waiting.remove(request)
        self._running[request.request_id] = request
        if self._static:
            self._static.num_left -= 1
        request.num_computed_tokens = num_cached
        if request.num_cached_tokens is None:  # for the first time, not after a preemption
            request.num_cached_tokens = num_cached
            request.scheduled_ns = now_ns
            if self.config.enable_prefix_cache and not request.wants_prompt_logits:
                self._num_prefix_queries += request.num_prompt_tokens
                self._num_prefix_hits += num_cached

    def _give_tokens(self, request: Request, num_tokens: int, step: Step) -> None:
        """Schedules up to that many tokens of a running request, and its drafts if they bring it up to date.

        Where blocks are missing others are preempted for it, or the request itself where it is the last in the order.
        """
        num_tokens = min(num_tokens, step.room(request))
        if num_tokens < 1 or request.request_id not in self._running:
            return
        end = request.num_computed_tokens + step.num_tokens.get(request.request_id, 0) + num_tokens
        if request.draft_token_ids:
            if end == request.num_tokens and self._kv.grow(request, end + len(request.draft_token_ids)):
                step.take(request, num_tokens + len(request.draft_token_ids))
                return
            request.draft_token_ids = ()  # a guess is not worth a preemption
        while not self._kv.grow(request, end):
            victim = max(self._running.values(), key=self._policy.rank)
            self._preempt(victim, step)
            if victim is request:
                return
        step.take(request, num_tokens)

    def _preempt(self, request: Request, step: Step) -> None:
        """Frees a running request's blocks; it waits to be computed again."""
        step.give_back(request)
        step.preempted.append(request.request_id)
        del self._running[request.request_id]
        self._kv.free(request)
        request.start_over()
        self._num_preemptions += 1
        self._waiting.push(request)

    def _is_long(self, request: Request) -> bool:
        return request.num_tokens > self.config.long_prefill_tokens
