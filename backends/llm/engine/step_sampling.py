"""From the logits of one step to the next tokens of its requests, and the log probabilities of their prompts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

from backends.llm.engine.outputs import RequestId, SchedulerOutput
from backends.llm.engine.sequences import Sequence
from backends.llm.errors import LogitsError
from backends.llm.sampling.grammar import Grammars, Mask, MaskRequest
from backends.llm.sampling.logprobs import prompt_logprobs
from backends.llm.sampling.sampler import Sampled, SampleRequest, sample

Logits = npt.NDArray[np.float32]


def sample_step(
    output: SchedulerOutput, logits: Logits, sequences: Mapping[RequestId, Sequence], grammars: Grammars
) -> tuple[dict[RequestId, Sampled], dict[RequestId, LogitsError]]:
    """Chooses the next tokens of all requests that this step brings up to date.

    Args:
        logits: [output.num_logits, vocab_size].
        grammars: make the masks of all answers that have a grammar, at once.

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
    wanted, rows = _masked(wanted, rows, grammars, errors)
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


def _masked(
    wanted: list[tuple[RequestId, SampleRequest]],
    rows: list[Logits],
    grammars: Grammars,
    errors: dict[RequestId, LogitsError],
) -> tuple[list[tuple[RequestId, SampleRequest]], list[Logits]]:
    """Returns the requests with their grammars' masks, and their rows; those whose grammar failed go to the errors."""
    asks = [MaskRequest(ask.state.matcher, ask.draft.token_ids) for _, ask in wanted if ask.state.matcher is not None]
    if not asks:
        return wanted, rows
    masks: Iterator[Mask | LogitsError] = iter(grammars.masks(asks))
    kept, kept_rows = [], []
    for (request_id, ask), mine in zip(wanted, rows, strict=True):
        mask = next(masks) if ask.state.matcher is not None else None
        if isinstance(mask, LogitsError):
            errors[request_id] = mask
            continue
        kept.append((request_id, ask._replace(allowed_tokens=mask)))
        kept_rows.append(mine)
    return kept, kept_rows


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
