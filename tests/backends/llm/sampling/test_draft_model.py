"""Drafts of a draft model: a toy that reads its context from the blocks, so wrong books give wrong drafts."""

from __future__ import annotations

import random

import numpy as np
import pytest

from backends.llm.engine.outputs import ModelRunnerOutput, RequestId, SchedulerOutput
from backends.llm.sampling.draft_model import DraftModelProposer
from backends.llm.sampling.proposer import NO_DRAFT, Draft

VOCAB_SIZE = 11
A, B, C = RequestId("a"), RequestId("b"), RequestId("c")


def next_token(context: list[int]) -> int:
    value = 7
    for token_id in context:
        value = (value * 31 + token_id + 1) % 1_000_003
    return value % VOCAB_SIZE


def continued(context: list[int], count: int) -> tuple[int, ...]:
    """The plain way: the whole context again for each token."""
    context = list(context)
    for _ in range(count):
        context.append(next_token(context))
    return tuple(context[len(context) - count :])


class ToyDraftModel:
    """Its cache holds the tokens themselves; its output is wider than the vocabulary."""

    vocab_size = VOCAB_SIZE + 5
    block_size = 4

    def __init__(self, num_blocks: int = 64, max_model_len: int = 1000) -> None:
        self.num_blocks = num_blocks
        self.max_model_len = max_model_len
        self.cache = np.full((num_blocks, self.block_size), -1)
        self.steps: list[dict[str, int]] = []
        self.closed = False

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        self.steps.append({r.request_id: len(r.token_ids) for r in output.requests})
        rows = []
        for r in output.requests:
            end = r.num_computed_tokens + len(r.token_ids)
            assert len(r.block_ids) == -(-end // self.block_size) and end <= self.max_model_len
            for position, token_id in enumerate(r.token_ids, start=r.num_computed_tokens):
                self.cache[r.block_ids[position // self.block_size], position % self.block_size] = token_id
        for r in output.requests:
            end = r.num_computed_tokens + len(r.token_ids)
            context = self.cache[list(r.block_ids)].reshape(-1)[:end].tolist()
            for _ in range(r.num_logits):
                row = np.zeros(self.vocab_size, dtype=np.float32)
                row[next_token(context)] = 1.0
                row[-1] = 2.0  # padding that is no token
                rows.append(row)
        return ModelRunnerOutput(np.array(rows, dtype=np.float32).reshape(len(rows), self.vocab_size))

    def close(self) -> None:
        self.closed = True


def proposer(model: ToyDraftModel, **limits: int) -> DraftModelProposer:
    return DraftModelProposer(model, vocab_size=VOCAB_SIZE, **{"max_model_len": 40, **limits})


def test_the_drafts_are_the_models_most_likely_tokens() -> None:
    drafts = proposer(ToyDraftModel())
    drafts.add(A, [1, 2, 3])
    assert drafts.propose({A: 4}) == {A: Draft(continued([1, 2, 3], 4))}


def test_requests_are_computed_together_and_each_gets_what_it_asked_for() -> None:
    model = ToyDraftModel()
    drafts = proposer(model)
    drafts.add(A, [1, 2, 3])
    drafts.add(B, [4, 5])
    seen = drafts.propose({A: 1, B: 3})
    assert seen == {A: Draft(continued([1, 2, 3], 1)), B: Draft(continued([4, 5], 3))}
    assert model.steps == [{A: 3, B: 2}, {B: 1}, {B: 1}] or model.steps == [{B: 2, A: 3}, {B: 1}, {B: 1}]


def test_what_came_true_is_not_computed_again() -> None:
    model = ToyDraftModel()
    drafts = proposer(model)
    drafts.add(A, [1, 2, 3])
    draft = drafts.propose({A: 4})[A].token_ids
    drafts.append(A, [*draft, 0])  # all accepted and one more
    model.steps.clear()
    assert drafts.propose({A: 1}) == {A: Draft(continued([1, 2, 3, *draft, 0], 1))}
    assert model.steps == [{A: 2}]  # the last draft, behind which nothing was computed, and the one more


def test_what_was_rejected_is_computed_again() -> None:
    model = ToyDraftModel()
    drafts = proposer(model)
    drafts.add(A, [1, 2, 3])
    draft = drafts.propose({A: 4})[A].token_ids
    other = (draft[1] + 1) % VOCAB_SIZE
    drafts.append(A, [draft[0], other])
    model.steps.clear()
    assert drafts.propose({A: 2}) == {A: Draft(continued([1, 2, 3, draft[0], other], 2))}
    assert model.steps == [{A: 1}, {A: 1}]


def test_a_long_prompt_is_computed_in_chunks_and_does_not_hold_up_the_others() -> None:
    model = ToyDraftModel()
    drafts = proposer(model, max_num_batched_tokens=8)
    prompt = list(range(10)) * 2
    drafts.add(A, prompt)
    drafts.add(B, [1])
    assert drafts.propose({A: 1, B: 1}) == {A: NO_DRAFT, B: Draft(continued([1], 1))}
    drafts.append(B, [5])
    assert drafts.propose({A: 1, B: 1}) == {A: NO_DRAFT, B: Draft(continued([1, 5], 1))}
    drafts.append(B, [6])
    assert drafts.propose({A: 1, B: 0}) == {A: Draft(continued(prompt, 1)), B: NO_DRAFT}
    assert [sum(step.values()) for step in model.steps] == [8, 8, 6]


def test_without_free_blocks_there_are_no_drafts_until_a_request_leaves() -> None:
    drafts = proposer(ToyDraftModel(num_blocks=20))  # 10 blocks for each request
    for request_id in (A, B, C):
        drafts.add(request_id, [1])
    assert drafts.propose({C: 2}) == {C: NO_DRAFT}
    drafts.append(C, [2])
    drafts.remove(A)
    drafts.remove(C)
    drafts.add(C, [1, 2])
    assert drafts.propose({C: 2}) == {C: Draft(continued([1, 2], 2))}
    drafts.remove(RequestId("unknown"))


def test_drafts_end_where_the_draft_model_does() -> None:
    drafts = proposer(ToyDraftModel(max_model_len=10))
    drafts.add(A, [1] * 8)
    assert len(drafts.propose({A: 5})[A].token_ids) == 2
    drafts.append(A, [1, 1, 1])
    assert drafts.propose({A: 5}) == {A: NO_DRAFT}


def test_the_proposer_closes_its_model() -> None:
    model = ToyDraftModel()
    proposer(model).close()
    assert model.closed


@pytest.mark.parametrize("seed", range(5))
def test_any_order_of_events_gives_the_plain_drafts(seed: int) -> None:
    rng = random.Random(seed)
    model = ToyDraftModel(num_blocks=33)
    drafts = proposer(model, max_num_batched_tokens=64)
    texts: dict[RequestId, list[int]] = {}
    drafted: dict[RequestId, tuple[int, ...]] = {}
    compared = 0
    for number in range(400):
        if len(texts) < 3 and rng.random() < 0.3:
            request_id = RequestId(f"r{number}")
            texts[request_id] = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 9))]
            drafts.add(request_id, texts[request_id])
        for request_id in list(texts):
            draft = drafted.pop(request_id, ())
            if rng.random() < 0.7 or draft:
                taken = [*draft[: rng.randint(0, len(draft))], rng.randrange(VOCAB_SIZE)]
                texts[request_id] += taken
                drafts.append(request_id, taken)
                if len(texts[request_id]) > 35 or rng.random() < 0.05:
                    del texts[request_id]
                    drafts.remove(request_id)
        asked = {request_id: rng.randint(0, 4) for request_id in texts}
        for request_id, draft_seen in drafts.propose(asked).items():
            if draft_seen.token_ids:
                assert draft_seen.token_ids == continued(texts[request_id], asked[request_id])
                drafted[request_id] = draft_seen.token_ids
                compared += 1
    assert compared > 200
