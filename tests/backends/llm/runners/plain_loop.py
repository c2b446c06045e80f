"""A scheduler of a few lines, for tests of runners alone: chunked prefill and decodes in the same steps."""

from __future__ import annotations

from collections.abc import Sequence

from backends.llm.engine.outputs import BlockId, RequestId, ScheduledRequest, SchedulerOutput
from backends.llm.runners.base import ModelRunner


def greedy(runner: ModelRunner, prompts: Sequence[Sequence[int]], num_tokens: int, budget: int = 24) -> list[list[int]]:
    """Returns the answers of all prompts; a step has one token of each running answer and `budget` of prompts.

    The prompts' tables interleave, so that no request's blocks stand in order.
    """
    tokens = [list(prompt) for prompt in prompts]
    computed, ends = [0] * len(prompts), [len(prompt) + num_tokens for prompt in prompts]
    free = [BlockId(b) for b in range(runner.num_blocks)]
    tables: list[list[BlockId]] = [[] for _ in prompts]
    while any(len(t) < end for t, end in zip(tokens, ends, strict=True)):
        parts, left = [], budget
        for i, row in enumerate(tokens):
            pending = len(row) - computed[i]
            count = pending if pending == 1 else min(pending, left)
            if len(row) == ends[i] or count == 0:
                continue
            left -= count if pending > 1 else 0
            stop = computed[i] + count
            while len(tables[i]) * runner.block_size < stop:
                tables[i].append(free.pop(0 if len(free) % 2 else -1))
            chunk = row[computed[i] : stop]
            parts.append(ScheduledRequest(RequestId(str(i)), chunk, computed[i], tables[i], int(stop == len(row))))
            computed[i] = stop
        logits = runner.execute(SchedulerOutput(tuple(parts))).logits
        sampled = [int(part.request_id) for part in parts if part.num_logits]
        for i, token in zip(sampled, logits.argmax(axis=1).tolist(), strict=True):
            tokens[i].append(token)
    return [row[len(prompt) :] for row, prompt in zip(tokens, prompts, strict=True)]
