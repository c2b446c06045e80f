"""SchedulerConfig: the limits and the policy of the scheduler, checked once."""

from __future__ import annotations

from dataclasses import dataclass

from backends.llm.plain_values import plain_integer

POLICIES = ("fcfs", "priority", "longest_prefix_match", "fair")
BATCHING = ("continuous", "static")
_LEAST = {
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "max_model_len": 1,
    "long_prefill_token_threshold": 1,
    "max_waiting": 0,
}
_OPTIONAL = ("long_prefill_token_threshold", "max_waiting")


@dataclass(frozen=True)
class SchedulerConfig:
    """How many requests and tokens one step may have, and who goes first.

    Attributes:
        max_num_seqs: requests that run at the same time.
        max_num_batched_tokens: tokens of one step. Every running request gets its one before a prompt gets a chunk.
        max_model_len: tokens of a prompt and its answer together.
        long_prefill_token_threshold: a prompt with more tokens is long. One long prompt at a time is computed, and
            while others wait it gets no more than this of a step. None is half of `max_num_batched_tokens`.
        policy: "fcfs"; "priority", smaller first; "longest_prefix_match", most cached tokens first; "fair", the client
            with the fewest tokens first.
        batching: "static" admits only when nothing runs; for comparison, nobody wants it.
        max_waiting: requests that may wait for others to end; one more is refused. None is no limit.
        enable_prefix_cache: share the blocks of equal prompt beginnings.

    Raises:
        ValueError: a value is out of range; the message names it.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_model_len: int = 4096
    long_prefill_token_threshold: int | None = None
    policy: str = "fcfs"
    batching: str = "continuous"
    max_waiting: int | None = None
    enable_prefix_cache: bool = True

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            given = getattr(self, name)
            if given is None and name in _OPTIONAL:
                continue
            value = plain_integer(given)
            if value is None or value < least:
                raise ValueError(f"{name} is {given!r}, an integer of at least {least} is needed")
            object.__setattr__(self, name, value)
        if not isinstance(self.enable_prefix_cache, bool):
            raise ValueError(f"enable_prefix_cache is {self.enable_prefix_cache!r}, true or false is needed")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, less than max_num_seqs {self.max_num_seqs}: "
                "a step must have room for one token of every running request"
            )
        for name, allowed in (("policy", POLICIES), ("batching", BATCHING)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is '{getattr(self, name)}', one of {', '.join(allowed)} is needed")

    @property
    def long_prefill_tokens(self) -> int:
        """What `long_prefill_token_threshold` comes to."""
        return self.long_prefill_token_threshold or max(1, self.max_num_batched_tokens // 2)
