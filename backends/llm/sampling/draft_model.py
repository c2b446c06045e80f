"""Drafts by a smaller model with the same tokenizer: its most likely next tokens, of all requests in common steps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from backends.llm.engine.outputs import BlockId, RequestId, ScheduledRequest, SchedulerOutput
from backends.llm.runners.base import ModelRunner
from backends.llm.sampling.proposer import NO_DRAFT, Draft


@dataclass(slots=True)
class _Text:
    """One request as the draft model sees it.

    Attributes:
        block_ids: its own from the first token to the last possible one, so nothing has to be scheduled.
        token_ids: prompt and answer.
        computed: the tokens whose keys and values are in the cache, in order; drafts may stand at the end.
    """

    block_ids: list[BlockId]
    token_ids: list[int]
    computed: list[int] = field(default_factory=list)

    def forget_rejected(self, first: int) -> None:
        """Cuts `computed` where it is not what the answer became; up to `first` it is."""
        while first < min(len(self.computed), len(self.token_ids)) and self.computed[first] == self.token_ids[first]:
            first += 1
        del self.computed[first:]


class DraftModelProposer:
    """Runs a draft model a few tokens ahead.

    The drafts are its most likely tokens and not drawn, so an answer has the very tokens that its seed gives without
    drafts (see `acceptance.verify_certain`). A request that finds no free blocks, or whose prompt is still being
    computed, gets no drafts.

    Args:
        runner: the draft model; its cache is divided into equal parts. The proposer closes it.
        vocab_size: of the model that verifies; the draft model's output may be padded to more.
        max_model_len: tokens of one prompt with its answer; each part has room for as many.
        max_num_batched_tokens: of one step of the draft model; a prompt is computed in chunks of at most as many.
    """

    def __init__(
        self, runner: ModelRunner, *, vocab_size: int, max_model_len: int, max_num_batched_tokens: int = 512
    ) -> None:
        self._runner = runner
        self._vocab_size = vocab_size
        self._max_tokens = max_num_batched_tokens
        blocks = -(-max_model_len // runner.block_size)
        self._room = min(blocks * runner.block_size, runner.max_model_len)
        starts = range(0, runner.num_blocks - blocks + 1, blocks)
        self._free = [[BlockId(start + i) for i in range(blocks)] for start in reversed(starts)]
        self._texts: dict[RequestId, _Text] = {}

    def add(self, request_id: RequestId, prompt_token_ids: Sequence[int]) -> None:
        """Gives the request blocks where there are any; its prompt is computed when a draft is asked for."""
        if self._free:
            self._texts[request_id] = _Text(self._free.pop(), list(prompt_token_ids))

    def append(self, request_id: RequestId, token_ids: Sequence[int]) -> None:
        """Takes note of the next tokens of the answer; what was computed of a draft that came true stays."""
        text = self._texts.get(request_id)
        if text is not None:
            known = len(text.token_ids)
            text.token_ids += token_ids
            text.forget_rejected(min(known, len(text.computed)))

    def propose(self, num_drafts: Mapping[RequestId, int]) -> dict[RequestId, Draft]:
        """Computes what is missing of each text, then the draft tokens one after the other."""
        drafts: dict[RequestId, list[int]] = {request_id: [] for request_id in num_drafts}
        wanted = {request_id: self._texts[request_id] for request_id in num_drafts if request_id in self._texts}
        counts = {i: min(num_drafts[i], self._room - len(text.token_ids)) for i, text in wanted.items()}
        chunks = self._chunks({i: text for i, text in wanted.items() if counts[i] > 0})
        while chunks:
            for request_id, token_id in self._step(chunks).items():
                drafts[request_id].append(token_id)
            chunks = {i: draft[-1:] for i, draft in drafts.items() if draft and len(draft) < counts[i]}
        return {i: Draft(tuple(draft)) if draft else NO_DRAFT for i, draft in drafts.items()}

    def remove(self, request_id: RequestId) -> None:
        """Gives the blocks back; also for a request that is not known."""
        text = self._texts.pop(request_id, None)
        if text is not None:
            self._free.append(text.block_ids)

    def close(self) -> None:
        """Frees the draft model."""
        self._runner.close()

    def _chunks(self, texts: Mapping[RequestId, _Text]) -> dict[RequestId, list[int]]:
        """Returns what the next step computes: all of those that miss little, of prompts what there is room for."""
        chunks: dict[RequestId, list[int]] = {}
        budget = self._max_tokens
        for request_id in sorted(texts, key=lambda i: len(texts[i].token_ids) - len(texts[i].computed)):
            text = texts[request_id]
            chunk = text.token_ids[len(text.computed) :][:budget]
            budget -= len(chunk)
            if chunk:
                chunks[request_id] = chunk
        return chunks

    def _step(self, chunks: Mapping[RequestId, list[int]]) -> dict[RequestId, int]:
        """Computes one step; returns the most likely next token of each request that is up to date with it."""
        scheduled, ready = [], []
        for request_id, chunk in chunks.items():
            text = self._texts[request_id]
            first = len(text.computed)
            text.computed += chunk
            is_ready = len(text.computed) >= len(text.token_ids)
            blocks = text.block_ids[: -(-len(text.computed) // self._runner.block_size)]
            scheduled.append(ScheduledRequest(request_id, chunk, first, blocks, int(is_ready)))
            if is_ready:
                ready.append(request_id)
        logits = self._runner.execute(SchedulerOutput(tuple(scheduled))).logits
        best: Iterable[int] = logits[:, : self._vocab_size].argmax(axis=1).tolist() if ready else ()
        return dict(zip(ready, best, strict=True))
