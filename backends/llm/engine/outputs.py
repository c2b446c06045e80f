"""What passes between the three calls of one engine step: schedule(), execute(), update_from_output()."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, NewType

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from backends.llm.engine.request import Request

RequestId = NewType("RequestId", str)
BlockId = NewType("BlockId", int)


class ScheduledRequest(NamedTuple):
    """The tokens of one request that one step computes: a prefill chunk, a decode and a draft differ in numbers only.

    Attributes:
        token_ids: the tokens to compute, not empty; draft tokens stand at the end.
        num_computed_tokens: tokens whose keys and values are in the cache already, so the position of `token_ids[0]`.
        block_ids: the block table, exactly the blocks that hold `num_computed_tokens + len(token_ids)` tokens.
        num_logits: how many of the last `token_ids` need logits: 0 for a chunk that is not the prompt's last,
            1 for one token to sample, 1 + drafts for a speculative step, all of them for prompt logprobs.
    """

    request_id: RequestId
    token_ids: Sequence[int]
    num_computed_tokens: int
    block_ids: Sequence[BlockId]
    num_logits: int


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """One step's work, in the order in which the model runner sees it.

    Attributes:
        requests: what is computed; an empty tuple where nothing can be done.
        preempted: requests that lost their blocks in this step and will be computed again.
    """

    requests: tuple[ScheduledRequest, ...]
    preempted: tuple[RequestId, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(r.token_ids) for r in self.requests)

    @property
    def num_logits(self) -> int:
        return sum(r.num_logits for r in self.requests)


@dataclass(frozen=True, slots=True)
class ModelRunnerOutput:
    """What the model says of one step.

    Attributes:
        logits: [SchedulerOutput.num_logits, vocab_size] float32; the rows of each request together, in the order of
            `SchedulerOutput.requests`. Valid until the next `execute`.
    """

    logits: npt.NDArray[np.float32]


class RequestUpdate(NamedTuple):
    """What one step did to a request that got tokens.

    Attributes:
        new_token_ids: the tokens that became part of the answer.
        num_accepted_drafts: how many of them were draft tokens.
    """

    request: Request
    new_token_ids: Sequence[int]
    num_accepted_drafts: int = 0


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Counters since the start, and what is there now."""

    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    num_preemptions: int
    num_prefix_queries: int
    num_prefix_hits: int

    @property
    def kv_cache_usage(self) -> float:
        """Share of the blocks that requests hold, 0 to 1."""
        return 1.0 - self.num_free_blocks / self.num_blocks
