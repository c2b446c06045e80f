"""Offline batches: many prompts at once, answered to the end, all or none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from backends.llm.engine.new_requests import Prompt
from backends.llm.engine.progress import token_progress
from backends.llm.engine.results import GenerateOutput
from backends.llm.engine.sequences import Group
from backends.llm.errors import InvalidRequest
from backends.llm.sampling.params import SamplingParams

if TYPE_CHECKING:
    from backends.llm.engine.engine import LLMEngine


def params_for_each(
    params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
) -> Sequence[SamplingParams]:
    """Returns one set of parameters for each prompt.

    Raises:
        InvalidRequest: they are something else, or not as many as the prompts.
    """
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * num_prompts
    if isinstance(params, str | Mapping) or not isinstance(params, Sequence):
        raise InvalidRequest(
            f"params is {repr(params)[:80]}; allowed: SamplingParams for all prompts, or one for each", param="params"
        )
    if len(params) != num_prompts:
        raise InvalidRequest(
            f"there are {len(params)} sampling parameters for {num_prompts} prompts; allowed: one for each, or one "
            "for all",
            param="params",
        )
    return params


def answer_all(
    engine: LLMEngine,
    live: Mapping[str, Group],
    asked: Mapping[str, tuple[Prompt, SamplingParams]],
    *,
    progress: bool,
) -> list[GenerateOutput]:
    """Runs an engine that has nothing else to do until all is answered; see `LLMEngine.generate`.

    Args:
        live: the engine's requests that have not ended; what is added to it is found here.
        asked: the prompts by the request ids that they get.

    Raises:
        InvalidRequest, RequestRefused: one of them is not taken; none is computed then.
    """
    groups: list[Group] = []
    try:
        for request_id, (prompt, params) in asked.items():
            engine.add_request(request_id, prompt, params)
            groups.append(live[request_id])
        with token_progress(len(groups), enabled=progress) as advance:
            while engine.has_requests:
                outputs = engine.step()
                advance(sum(o.is_last for o in outputs), sum(len(o.delta.token_ids) for o in outputs))
    finally:
        for group in groups:
            engine.abort(group.request_id)
    return [group.result() for group in groups]
