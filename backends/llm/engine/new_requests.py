"""RequestMaker: from what a user asks to a Group whose answers have not started. Nothing else changes here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from backends.llm.engine.outputs import RequestId
from backends.llm.engine.request import Request
from backends.llm.engine.sequences import Group
from backends.llm.engine.sequences import Sequence as AnswerSequence
from backends.llm.errors import InvalidRequest
from backends.llm.sampling.answer import Answer
from backends.llm.sampling.grammar import Grammars
from backends.llm.sampling.params import SamplingParams
from backends.llm.sampling.randomness import seed_from_request_id
from backends.llm.sampling.state import SamplerState
from backends.llm.tokenizers.base import Tokenizer

Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class RequestMaker:
    """Makes the requests for one model.

    Attributes:
        grammars: where compiled ones are found.
        max_model_len: tokens of a prompt and its answer together; the limit of an answer that names none.
    """

    tokenizer: Tokenizer
    grammars: Grammars
    vocab_size: int
    max_model_len: int

    def token_ids(self, prompt: Prompt) -> tuple[int, ...]:
        """Returns the tokens of a prompt.

        Raises:
            InvalidRequest: one is not in the vocabulary.
        """
        if isinstance(prompt, str):
            return tuple(self.tokenizer.encode(prompt))
        for token_id in prompt:
            if not 0 <= token_id < self.vocab_size:
                allowed = f"0 to {self.vocab_size - 1}, the model's vocabulary"
                raise InvalidRequest(f"the prompt has token id {token_id}; allowed: {allowed}", param="prompt")
        return tuple(prompt)

    def make(
        self,
        request_id: str,
        prompt_token_ids: tuple[int, ...],
        params: SamplingParams,
        *,
        arrival_ns: int,
        priority: int,
        client: str,
        deadline_ns: int | None,
        cache_salt: str,
    ) -> Group:
        """Returns a request with its `params.n` answers.

        Args:
            request_id: of the group; that of the only answer too, and of several with their numbers behind it.
            prompt_token_ids: as `token_ids` gives them.
            params: checked against the vocabulary already.
            arrival_ns, deadline_ns: on the engine's clock.

        Raises:
            InvalidRequest: the grammar is not taken.
        """
        group = Group(request_id, params, deadline_ns=deadline_ns)
        if params.prompt_logprobs is not None:
            group.prompt_logprobs = []
        for index in range(params.n):
            request = Request(
                request_id=RequestId(request_id if params.n == 1 else f"{request_id}/{index}"),
                prompt_token_ids=prompt_token_ids,
                max_output_tokens=params.max_tokens or self.max_model_len,
                arrival_ns=arrival_ns,
                stop_token_ids=self._stop_token_ids(params),
                min_output_tokens=params.min_tokens,
                priority=priority,
                client=client,
                cache_salt=cache_salt.encode(),
                wants_prompt_logits=params.prompt_logprobs is not None and index == 0,
            )
            group.sequences.append(self._sequence(group, index, request))
        return group

    def _stop_token_ids(self, params: SamplingParams) -> frozenset[int]:
        own = frozenset() if params.ignore_eos else self.tokenizer.eos_token_ids
        return own | frozenset(params.stop_token_ids)

    def _sequence(self, group: Group, index: int, request: Request) -> AnswerSequence:
        params = group.params
        wanted = params.structured_outputs
        state = SamplerState(
            params,
            request.prompt_token_ids,
            seed=seed_from_request_id(group.request_id) if params.seed is None else params.seed,
            sample_index=index,
            stop_token_ids=request.stop_token_ids,
            matcher=self.grammars.compile(wanted, ignore_eos=params.ignore_eos) if wanted else None,
        )
        return AnswerSequence(group, index, request, state, Answer(params, self.tokenizer))
