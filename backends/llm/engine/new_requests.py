"""RequestMaker: from what a user asks to a Group whose answers have not started. Nothing else changes here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from backends.llm.engine.outputs import RequestId
from backends.llm.engine.request import Request
from backends.llm.engine.sequences import Group
from backends.llm.engine.sequences import Sequence as AnswerSequence
from backends.llm.errors import InvalidRequest
from backends.llm.plain_values import plain_integer, plain_number
from backends.llm.sampling.answer import Answer
from backends.llm.sampling.grammar import Grammars
from backends.llm.sampling.params import SamplingParams
from backends.llm.sampling.randomness import seed_from_request_id
from backends.llm.sampling.state import SamplerState
from backends.llm.tokenizers.base import Tokenizer

Prompt = str | Sequence[int]
MAX_DEADLINE_MS = 1e17  # more than any timeout that Triton can pass on: 2 ** 64 us are 1.8e16 ms


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
            InvalidRequest: it is neither a text nor token ids, or has a token that the model does not.
        """
        if isinstance(prompt, str):
            token_ids, whose = tuple(self.tokenizer.encode(prompt)), ", which its tokenizer has and the model has not"
        else:
            token_ids, whose = _plain_ids(prompt), ""
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self.vocab_size:
            wrong = next(i for i in token_ids if not 0 <= i < self.vocab_size)
            allowed = f"0 to {self.vocab_size - 1}, the model's vocabulary"
            raise InvalidRequest(f"the prompt has token id {wrong}{whose}; allowed: {allowed}", param="prompt")
        return token_ids

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
            request_id: of the group. Those of its answers have their numbers before it, so that no two are the same,
                whatever ids callers choose.
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
                request_id=RequestId(f"{index}/{request_id}"),
                prompt_token_ids=prompt_token_ids,
                max_output_tokens=params.max_tokens or self.max_model_len,
                arrival_ns=arrival_ns,
                stop_token_ids=self._stop_token_ids(params),
                min_output_tokens=params.min_tokens,
                priority=priority,
                client=client,
                cache_salt=cache_salt.encode("utf-8", "surrogatepass"),
                wants_prompt_logits=params.prompt_logprobs is not None and index == 0,
            )
            group.sequences.append(self._sequence(group, index, request))
        return group

    def _stop_token_ids(self, params: SamplingParams) -> frozenset[int]:
        # A tokenizer may name an end token that the model's output has no place for.
        own = () if params.ignore_eos else (i for i in self.tokenizer.eos_token_ids if i < self.vocab_size)
        return frozenset(own) | frozenset(params.stop_token_ids)

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


def check_fields(
    request_id: Any, params: Any, *, priority: Any, client: Any, deadline_ms: Any, cache_salt: Any
) -> None:
    """Checks the types of what goes with a prompt: a wrong one would fail in a later step, and all requests with it.

    Raises:
        InvalidRequest: by the argument's name.
    """
    for name, value in (("request_id", request_id), ("client", client), ("cache_salt", cache_salt)):
        if not isinstance(value, str):
            raise _refusal(name, value, "text")
    if not isinstance(params, SamplingParams):
        raise _refusal("params", params, "SamplingParams")
    if plain_integer(priority) is None:
        raise _refusal("priority", priority, "an integer")
    number = 0.0 if deadline_ms is None else plain_number(deadline_ms)
    if number is None or not abs(number) <= MAX_DEADLINE_MS:
        raise _refusal("deadline_ms", deadline_ms, f"a number up to {MAX_DEADLINE_MS:g}; None is no deadline")


def _plain_ids(prompt: Any) -> tuple[int, ...]:
    if isinstance(prompt, bytes | bytearray | memoryview | Mapping) or not isinstance(prompt, Iterable):
        raise _refusal("the prompt", prompt, "a text, or a sequence of token ids")
    token_ids = tuple(prompt)
    if all(type(token_id) is int for token_id in token_ids):
        return token_ids
    plain = []
    for token_id in token_ids:
        value = plain_integer(token_id)
        if value is None:
            raise _refusal("a token id of the prompt", token_id, "integers")
        plain.append(value)
    return tuple(plain)


def _refusal(name: str, value: object, allowed: str) -> InvalidRequest:
    param = "prompt" if "prompt" in name else name
    return InvalidRequest(f"{name} is {repr(value)[:80]}; allowed: {allowed}", param=param)
