"""A toy model: a token depends on the whole context, read from the paged cache, so wrong blocks give wrong tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from backends.llm.engine.config import SchedulerConfig
from backends.llm.engine.kv_cache_manager import KVCacheManager
from backends.llm.engine.outputs import ModelRunnerOutput, RequestId, RequestUpdate, SchedulerOutput
from backends.llm.engine.request import Request
from backends.llm.engine.scheduler import Scheduler

VOCAB_SIZE = 97


def next_token(context: Sequence[int]) -> int:
    """Returns what the toy model says after a context."""
    value = 7
    for token_id in context:
        value = (value * 31 + token_id + 1) % 1_000_003
    return value % VOCAB_SIZE


def plain_answer(prompt: Sequence[int], num_tokens: int, stop: frozenset[int] = frozenset()) -> list[int]:
    """Returns the answer of the plain way: the whole context again for each token."""
    context = list(prompt)
    for _ in range(num_tokens):
        context.append(next_token(context))
        if context[-1] in stop:
            break
    return context[len(prompt) :]


class ToyRunner:
    """A model runner whose cache holds the tokens themselves."""

    name = "toy"
    vocab_size = VOCAB_SIZE
    max_model_len = 1 << 20
    block_bytes = 0

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.cache = np.full((num_blocks, block_size), -1, dtype=np.int64)
        self.num_computed = 0

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        rows = []
        for r in output.requests:
            assert len(r.block_ids) == -(-(r.num_computed_tokens + len(r.token_ids)) // self.block_size)
            for position, token_id in enumerate(r.token_ids, start=r.num_computed_tokens):
                self.cache[r.block_ids[position // self.block_size], position % self.block_size] = token_id
            self.num_computed += len(r.token_ids)
        for r in output.requests:
            end = r.num_computed_tokens + len(r.token_ids)
            context = self.cache[list(r.block_ids)].reshape(-1)[:end]
            for position in range(end - r.num_logits, end):
                row = np.zeros(VOCAB_SIZE, dtype=np.float32)
                row[next_token(context[: position + 1].tolist())] = 1.0
                rows.append(row)
        return ModelRunnerOutput(np.array(rows, dtype=np.float32).reshape(len(rows), VOCAB_SIZE))

    def close(self) -> None: ...


class Toy:
    """A scheduler, its cache and the toy model, stepped by hand; `check_invariants` runs after every step."""

    def __init__(
        self, num_blocks: int = 64, block_size: int = 4, hash_function: object = None, **config: object
    ) -> None:
        defaults = {"max_num_seqs": 8, "max_num_batched_tokens": 16, "max_model_len": 256}
        self.config = SchedulerConfig(**{**defaults, **config})  # type: ignore[arg-type]
        extra = {"hash_function": hash_function} if hash_function else {}
        self.kv = KVCacheManager(
            num_blocks,
            block_size,
            enable_prefix_cache=self.config.enable_prefix_cache,
            **extra,  # type: ignore[arg-type]
        )
        self.scheduler = Scheduler(self.config, self.kv)
        self.runner = ToyRunner(num_blocks, block_size)
        self.requests: dict[str, Request] = {}

    def add(self, request_id: str, prompt: Sequence[int], max_output_tokens: int = 8, **fields: object) -> Request:
        request = Request(RequestId(request_id), tuple(prompt), max_output_tokens, **fields)  # type: ignore[arg-type]
        self.scheduler.add_request(request)
        self.requests[request_id] = request
        return request

    def step(
        self, propose: Callable[[Request], Sequence[int]] | None = None
    ) -> tuple[SchedulerOutput, list[RequestUpdate]]:
        output = self.scheduler.schedule()
        assert output.num_tokens <= self.config.max_num_batched_tokens
        logits = self.runner.execute(output).logits
        sampled: dict[RequestId, Sequence[int]] = {}
        row = 0
        for r in output.requests:
            rows = logits[row : row + r.num_logits].argmax(axis=1).tolist()
            row += r.num_logits
            request = self.requests[r.request_id]
            if r.num_computed_tokens + len(r.token_ids) >= request.num_tokens:
                drafts = list(request.draft_token_ids)
                rows = rows[len(rows) - 1 - len(drafts) :]
                accepted = 0
                while accepted < len(drafts) and drafts[accepted] == rows[accepted]:
                    accepted += 1
                sampled[r.request_id] = rows[: accepted + 1]
        updates = self.scheduler.update_from_output(output, sampled)
        self.scheduler.check_invariants()
        if propose is not None:
            for update in updates:
                self.scheduler.set_drafts(update.request.request_id, propose(update.request))
        return output, updates

    def run(self, propose: Callable[[Request], Sequence[int]] | None = None, max_steps: int = 10_000) -> None:
        for _ in range(max_steps):
            if not self.scheduler.has_requests:
                return
            output, _ = self.step(propose)
            assert output.requests, "requests wait, and nothing is done"
        raise AssertionError(f"not done after {max_steps} steps")

    def answer(self, request_id: str) -> list[int]:
        request = self.requests[request_id]
        return request.token_ids[request.num_prompt_tokens :]

    def assert_all_free(self) -> None:
        assert self.kv.pool.num_free_blocks == self.kv.pool.num_blocks


def chunks(output: SchedulerOutput) -> dict[str, int]:
    """Returns how many tokens of each request a step has."""
    return {str(r.request_id): len(r.token_ids) for r in output.requests}
