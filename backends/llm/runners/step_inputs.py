"""One step's work as flat arrays, which is how every runner's attention over block tables takes it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from backends.llm.engine.outputs import ScheduledRequest

if TYPE_CHECKING:
    import numpy.typing as npt

    Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The tokens of all requests, one after the other, all int32.

    Attributes:
        input_ids, position_ids: [num_tokens].
        past_lens: [num_requests] tokens that are in the cache already.
        subsequence_begins: [num_requests + 1] where each request's tokens start in `input_ids`.
        block_indices: [sum of blocks] the block tables, one after the other.
        block_indices_begins: [num_requests + 1] where each table starts in it.
        max_context_len: [] tokens of the longest request, those of this step included.
        logits_indices: [num_logits] the tokens, by their place in `input_ids`, whose logits are asked for.
    """

    input_ids: Int32s
    position_ids: Int32s
    past_lens: Int32s
    subsequence_begins: Int32s
    block_indices: Int32s
    block_indices_begins: Int32s
    max_context_len: Int32s
    logits_indices: Int32s


def flatten(requests: Sequence[ScheduledRequest]) -> StepInputs:
    """Lays out a step. `array` takes a list of ints several times faster than numpy does."""
    ids, positions, blocks, logits = array("i"), array("i"), array("i"), array("i")
    past, begins, block_begins = array("i"), array("i", [0]), array("i", [0])
    longest = 0
    for _, token_ids, computed, block_ids, num_logits in requests:
        ids.extend(token_ids)
        end, total = len(ids), computed + len(token_ids)
        positions.extend(range(computed, total))
        past.append(computed)
        begins.append(end)
        blocks.extend(block_ids)
        block_begins.append(len(blocks))
        logits.extend(range(end - num_logits, end))
        longest = max(longest, total)
    return StepInputs(
        input_ids=np.array(ids, dtype=np.int32),
        position_ids=np.array(positions, dtype=np.int32),
        past_lens=np.array(past, dtype=np.int32),
        subsequence_begins=np.array(begins, dtype=np.int32),
        block_indices=np.array(blocks, dtype=np.int32),
        block_indices_begins=np.array(block_begins, dtype=np.int32),
        max_context_len=np.array(longest, dtype=np.int32),
        logits_indices=np.array(logits, dtype=np.int32),
    )


def one_by_one(requests: Sequence[ScheduledRequest], block_size: int) -> list[ScheduledRequest]:
    """Splits requests into sequences of one token each, over the same blocks.

    A step writes all keys and values before it attends, so token i + 1 sees token i. What a token's result depends on
    is then its own context alone, and not whether it came in a chunk, as a decode, as a draft or after a preemption.
    """
    singles = []
    for request_id, token_ids, computed, block_ids, num_logits in requests:
        first_logits = len(token_ids) - num_logits
        for index, token_id in enumerate(token_ids):
            position = computed + index
            blocks = block_ids[: position // block_size + 1]
            singles.append(ScheduledRequest(request_id, (token_id,), position, blocks, int(index >= first_logits)))
    return singles
