"""Step: one step while the scheduler puts it together, and its form for the model runner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from backends.llm.engine.kv_cache_manager import KVCacheManager
from backends.llm.engine.outputs import RequestId, ScheduledRequest
from backends.llm.engine.request import Request

MAX_PROMPT_LOGITS = 64


@dataclass(slots=True)
class Step:
    """What a step has so far.

    Attributes:
        budget: tokens that may still be scheduled.
        prompt_logits: of these, tokens of prompts that all need logits. A row is as wide as the vocabulary: of Gemma 3
            one takes a megabyte, and a step of 4,096 would take four gigabytes, for one request that asks for them.
        now_ns: when it begins.
        num_tokens: tokens of each request in it, drafts included.
        preempted: requests that lost their blocks for it.
    """

    budget: int
    now_ns: int = 0
    prompt_logits: int = MAX_PROMPT_LOGITS
    num_tokens: dict[RequestId, int] = field(default_factory=dict)
    preempted: list[RequestId] = field(default_factory=list)

    def room(self, request: Request) -> int:
        """Returns how many tokens of a request still fit.

        A prompt that needs logits always gets one while there is budget: none waits for another's, or holds up a queue.
        """
        least = 0 if request.request_id in self.num_tokens else 1
        return min(self.budget, max(least, self.prompt_logits)) if request.needs_prompt_logits else self.budget

    def take(self, request: Request, count: int) -> None:
        """Adds tokens of a request, which may have some already."""
        self.num_tokens[request.request_id] = self.num_tokens.get(request.request_id, 0) + count
        self.budget -= count
        self.prompt_logits -= count if request.needs_prompt_logits else 0

    def give_back(self, request: Request) -> None:
        """Takes a request out again, as long as it is as it was."""
        count = self.num_tokens.pop(request.request_id, 0)
        self.budget += count
        self.prompt_logits += count if request.needs_prompt_logits else 0


def scheduled_requests(
    step: Step, running: Mapping[RequestId, Request], kv_cache: KVCacheManager
) -> tuple[ScheduledRequest, ...]:
    """Returns the tokens of a finished step with their blocks, and which of them need logits."""
    scheduled = []
    for request_id, num_tokens in step.num_tokens.items():
        request = running[request_id]
        start, end = request.num_computed_tokens, request.num_computed_tokens + num_tokens
        token_ids = request.token_ids[start:end]
        num_logits = 0
        if end >= request.num_tokens:  # up to date after this step: the next token is sampled
            token_ids += request.draft_token_ids
            num_logits = 1 + len(request.draft_token_ids)
        if request.needs_prompt_logits:
            num_logits = len(token_ids)
        block_ids = kv_cache.block_ids(request_id, end)
        scheduled.append(ScheduledRequest(request_id, token_ids, start, block_ids, num_logits))
    return tuple(scheduled)
