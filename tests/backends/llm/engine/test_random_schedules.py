"""Random schedules against the plain way: adds, aborts, drafts, tiny pools; the books are checked after every step."""

from __future__ import annotations

import os
import random

import pytest

from backends.llm.engine.config import POLICIES
from backends.llm.engine.request import FinishReason, Request
from backends.llm.errors import RequestRefused
from tests.backends.llm.engine.toy import VOCAB_SIZE, Toy, plain_answer

NUM_SCHEDULES = int(os.environ.get("MODELKILN_RANDOM_SCHEDULES", "150"))  # `make soak` asks for thousands


def random_toy(rng: random.Random) -> Toy:
    block_size = rng.choice([1, 2, 4, 8])
    max_num_seqs = rng.randint(1, 8)
    return Toy(
        num_blocks=rng.randint(4, 40),
        block_size=block_size,
        hash_function=(lambda data: bytes([data[-8] & 3])) if rng.random() < 0.1 else None,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=rng.randint(max_num_seqs, max_num_seqs + 24),
        max_model_len=rng.randint(4, 80),
        long_prefill_token_threshold=rng.choice([None, 1, 5, 20]),
        policy=rng.choice(POLICIES),
        batching="static" if rng.random() < 0.1 else "continuous",
        enable_prefix_cache=rng.random() < 0.8,
    )


def random_prompt(rng: random.Random, prompts: list[list[int]], longest: int) -> list[int]:
    length = rng.randint(1, max(1, longest))
    if prompts and rng.random() < 0.7:
        shared = rng.choice(prompts)
        shared = shared[: rng.randint(0, len(shared))]
    else:
        shared = []
    return [*shared, *(rng.randrange(3) for _ in range(length))][:length]


def run_schedule(seed: int) -> int:
    """Runs one random schedule; returns how many preemptions it had."""
    rng = random.Random(seed)
    toy = random_toy(rng)

    def propose(request: Request) -> list[int]:
        guess = plain_answer(request.token_ids, rng.randint(0, 4))
        return [t if rng.random() < 0.8 else rng.randrange(VOCAB_SIZE) for t in guess]

    prompts: list[list[int]] = []
    num_requests = rng.randint(1, 24)
    added = 0
    speculate = rng.random() < 0.5
    while added < num_requests or toy.scheduler.has_requests:
        while added < num_requests and (rng.random() < 0.5 or not toy.scheduler.has_requests):
            prompt = random_prompt(rng, prompts, toy.scheduler.max_model_len)
            prompts.append(prompt)
            fields = {
                "stop_token_ids": frozenset(rng.sample(range(VOCAB_SIZE), 4)),
                "priority": rng.randint(0, 3),
                "client": rng.choice("xyz"),
                "arrival_ns": added,
                "cache_salt": rng.choice([b"", b"", b"s"]),
                "wants_prompt_logits": rng.random() < 0.1,
            }
            try:
                toy.add(f"r{added}", prompt, rng.randint(1, 30), **fields)
            except RequestRefused:
                assert len(prompt) >= toy.scheduler.max_model_len
            added += 1
        for request_id in [str(r.request_id) for r in toy.requests.values() if r.finish_reason is None]:
            if rng.random() < 0.02:
                toy.scheduler.finish(request_id, FinishReason.ABORT)
                toy.scheduler.check_invariants()
        if toy.scheduler.has_requests:
            output, _ = toy.step(propose if speculate else None)
            assert output.requests, "requests are here, and the step is empty"
    toy.assert_all_free()
    for request in toy.requests.values():
        stop = request.stop_token_ids
        expected = plain_answer(request.prompt_token_ids, request.max_output_tokens, stop)
        answer = toy.answer(str(request.request_id))
        if request.finish_reason is FinishReason.ABORT:
            assert answer == expected[: len(answer)]
        else:
            assert answer == expected
            assert request.finish_reason is (FinishReason.STOP if answer[-1] in stop else FinishReason.LENGTH)
    return sum(r.num_preemptions for r in toy.requests.values())


def test_random_schedules_give_the_answers_of_the_plain_way_and_free_every_block():
    preemptions = [run_schedule(seed) for seed in range(NUM_SCHEDULES)]
    assert sum(count > 0 for count in preemptions) > NUM_SCHEDULES // 20, "the pools are too large to test preemption"


@pytest.mark.parametrize("wrong", ["no_parent_check", "early_publish"])
def test_the_oracle_sees_a_cache_that_is_wrong(wrong, monkeypatch):
    """The comparison above fails on faults that were made on purpose."""
    from backends.llm.engine.block_pool import BlockPool
    from backends.llm.engine.kv_cache_manager import KVCacheManager

    if wrong == "no_parent_check":
        monkeypatch.setattr(BlockPool, "find", lambda self, key, parent: self._index.get(key.block_hash))
    else:
        real = KVCacheManager.publish

        def publish(self, request):
            computed, request.num_computed_tokens = request.num_computed_tokens, request.num_tokens
            real(self, request)
            request.num_computed_tokens = computed

        monkeypatch.setattr(KVCacheManager, "publish", publish)
    with pytest.raises((AssertionError, IndexError)):
        for seed in range(150):
            run_schedule(seed)
