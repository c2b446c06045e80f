"""From the logits of one step to the next tokens of its requests, and the log probabilities of their prompts."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from backends.llm.engine.outputs import RequestId, SchedulerOutput
from backends.llm.engine.sequences import Sequence
from backends.llm.errors import LogitsError
from backends.llm.sampling.logprobs import prompt_logprobs
from backends.llm.sampling.sampler import Sampled, SampleRequest, sample

Logits = npt.NDArray[np.float32]


def sample_step(
    output: SchedulerOutput, logits: Logits, sequences: Mapping[RequestId, Sequence]
) -> tuple[dict[RequestId, Sampled], dict[RequestId, LogitsError]]:
    """Chooses the next tokens of all requests that this step brings up to date.

    Args:
        logits: [output.num_logits, vocab_size].

    Returns:
        The tokens by request, and the errors of those that have none.
    """
    wanted: list[tuple[RequestId, SampleRequest]] = []
    errors: dict[RequestId, LogitsError] = {}
    rows: list[Logits] = []
    first = 0
    for scheduled in output.requests:
        sequence = sequences[scheduled.request_id]
        request = sequence.request
        mine = logits[first : first + scheduled.num_logits]
        first += scheduled.num_logits
        if request.wants_prompt_logits:
            try:
                _keep_prompt_logprobs(sequence, scheduled.num_computed_tokens, mine)
            except LogitsError as error:
                errors[request.request_id] = error
                continue
        if scheduled.num_computed_tokens + len(scheduled.token_ids) >= request.num_tokens:
            # The scheduler may have had room for fewer drafts than were proposed.
            sequence.draft = sequence.draft.first(len(request.draft_token_ids))
            ask = SampleRequest(sequence.sampler, sequence.draft)
            wanted.append((request.request_id, ask))
            rows.append(mine[len(mine) - ask.num_rows :])
    if not wanted:
        return {}, errors
    # The rows of a step without prompt logits are just the ones to sample: nothing is copied then.
    used = logits if sum(len(r) for r in rows) == len(logits) else np.concatenate(rows)
    sampled: dict[RequestId, Sampled] = {}
    for (request_id, _), result in zip(wanted, sample(used, [ask for _, ask in wanted]), strict=True):
        if isinstance(result, LogitsError):
            errors[request_id] = result
        else:
            sampled[request_id] = result
    return sampled, errors


def _keep_prompt_logprobs(sequence: Sequence, start: int, logits: Logits) -> None:
    """Takes the log probabilities of prompt tokens; of each once, also where a preempted prompt is computed again.

    Args:
        start: position of the token that row 0 was computed at; it says how likely the token after it is.
    """
    kept, num_top = sequence.group.prompt_logprobs, sequence.group.params.prompt_logprobs
    assert kept is not None and num_top is not None
    begin = max(start, len(kept))
    targets = sequence.request.prompt_token_ids[begin + 1 : start + len(logits) + 1]
    if targets:
        rows = logits[begin - start : begin - start + len(targets)]
        kept.extend(prompt_logprobs(rows, targets, num_top))
