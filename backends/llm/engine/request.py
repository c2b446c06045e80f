"""Request: one sequence on its way through the engine. What it is made of is fixed; how far it is changes each step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from backends.llm.engine.block_hash import PrefixKey
from backends.llm.engine.outputs import RequestId


class FinishReason(Enum):
    """Why a request ended; the values are those of the OpenAI API where it has one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    DEADLINE = "deadline"
    ERROR = "error"


@dataclass(eq=False, slots=True)
class Request:
    """One sequence.

    Attributes:
        prompt_token_ids: not empty.
        max_output_tokens: the answer ends with LENGTH after that many tokens.
        stop_token_ids: the answer ends with STOP at one of these, once it has `min_output_tokens`.
        arrival_ns: on the clock of whoever calls the scheduler.
        priority: smaller goes first, under the policy `priority`.
        client: whom the tokens are charged to, under the policy `fair`.
        cache_salt: requests share cached blocks only within one salt.
        wants_prompt_logits: logits of every prompt token are needed, so no cached prefix is used.
        order: the how-manieth request of its scheduler it is, which decides between equals.
        token_ids: prompt and answer so far.
        draft_token_ids: guesses of the next tokens, to be verified in the next step.
        prefix_keys: the names of its first full blocks, as far as they were needed.
        num_computed_tokens: how many of `token_ids` have their keys and values in the cache.
        num_cached_tokens: of these, how many were found there when the request was first admitted.
        scheduled_ns: when that was, on the clock of `arrival_ns`.
    """

    request_id: RequestId
    prompt_token_ids: tuple[int, ...]
    max_output_tokens: int
    arrival_ns: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    min_output_tokens: int = 0
    priority: int = 0
    client: str = ""
    cache_salt: bytes = b""
    wants_prompt_logits: bool = False

    order: int = field(init=False, default=0)
    token_ids: list[int] = field(init=False)
    draft_token_ids: Sequence[int] = field(init=False, default=())
    prefix_keys: list[PrefixKey] = field(init=False, default_factory=list)
    num_computed_tokens: int = field(init=False, default=0)
    num_cached_tokens: int | None = field(init=False, default=None)
    scheduled_ns: int | None = field(init=False, default=None)
    num_preemptions: int = field(init=False, default=0)
    finish_reason: FinishReason | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def needs_prompt_logits(self) -> bool:
        """The next tokens to compute are the prompt's, and all of them need logits."""
        return self.wants_prompt_logits and self.num_computed_tokens < len(self.prompt_token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens that a step must compute before the next one can be sampled: 1 while decoding."""
        return len(self.token_ids) - self.num_computed_tokens

    def start_over(self) -> None:
        """Forgets what was computed, not what was said: the answer so far is part of what will be computed again."""
        self.num_computed_tokens = 0
        self.draft_token_ids = ()
        self.num_preemptions += 1

    def append(self, sampled: Sequence[int]) -> Sequence[int]:
        """Takes over sampled tokens up to the first that ends the answer; sets `finish_reason` there.

        Returns:
            The tokens that were taken.
        """
        for index, token_id in enumerate(sampled):
            self.token_ids.append(token_id)
            num_output = self.num_output_tokens
            if token_id in self.stop_token_ids and num_output >= self.min_output_tokens:
                self.finish_reason = FinishReason.STOP
            elif num_output >= self.max_output_tokens:
                self.finish_reason = FinishReason.LENGTH
            if self.finish_reason is not None:
                return sampled[: index + 1]
        return sampled
