"""SamplerState: what sampling one answer needs to remember. It follows tokens only: preemption does not touch it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from backends.llm.sampling.grammar import Matcher
from backends.llm.sampling.params import SamplingParams
from backends.llm.sampling.penalties import TokenCounts
from backends.llm.sampling.randomness import Purpose, uniform


class SamplerState:
    """One answer on its way: its parameters, its length, its token counts, its random stream.

    Attributes:
        params: checked against the vocabulary already.
        matcher: how far the answer is in its grammar; None where it has none.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        *,
        seed: int,
        sample_index: int = 0,
        stop_token_ids: Collection[int] = (),
        matcher: Matcher | None = None,
    ) -> None:
        """
        Args:
            params: how to choose.
            prompt_token_ids: for the repetition penalty, and for the positions.
            seed: `params.seed`, or `seed_from_request_id`.
            sample_index: which of `params.n` answers.
            stop_token_ids: all that end the answer, the model's own among them; impossible before `params.min_tokens`.
        """
        self.params = params
        self.matcher = matcher
        self._seed = seed
        self._sample_index = sample_index
        self._num_prompt_tokens = len(prompt_token_ids)
        self._num_output_tokens = 0
        self._stop_ids = np.array(sorted(set(stop_token_ids)), dtype=np.int64)
        self._bias_ids = np.array(list(params.logit_bias), dtype=np.int64)
        self._bias = np.array(list(params.logit_bias.values()), dtype=np.float32)
        # Only the repetition penalty looks at the prompt.
        counted = prompt_token_ids if params.repetition_penalty != 1 else ()
        self._counts = TokenCounts(counted) if params.has_penalties else None

    @property
    def num_output_tokens(self) -> int:
        return self._num_output_tokens

    @property
    def adjusts(self) -> bool:
        """The next row of logits is changed before a token is chosen."""
        return self._counts is not None or len(self._bias_ids) > 0 or self._bans_stop_tokens

    @property
    def is_complete(self) -> bool:
        """The answer has come to the end of its grammar."""
        return self.matcher is not None and self.matcher.is_complete

    @property
    def _bans_stop_tokens(self) -> bool:
        return self._num_output_tokens < self.params.min_tokens and len(self._stop_ids) > 0

    def append(self, token_id: int) -> None:
        """Takes note of the answer's next token.

        Raises:
            LogitsError: the grammar cannot follow.
        """
        if self.matcher is not None:
            self.matcher.accept(token_id)
        self._num_output_tokens += 1
        if self._counts is not None:
            self._counts.add(token_id)

    def adjust(self, logits: npt.NDArray[np.float32]) -> None:
        """Applies, in place and in vLLM's order: the ban of stop tokens, logit bias, penalties.

        Args:
            logits: [vocab_size], written.
        """
        if self._bans_stop_tokens:
            logits[self._stop_ids] = -np.inf
        logits[self._bias_ids] += self._bias
        if self._counts is not None:
            self._counts.penalise(logits, self.params)

    def uniform(self, purpose: Purpose) -> float:
        """Returns the number in [0, 1) of the next token's position."""
        position = self._num_prompt_tokens + self._num_output_tokens
        return uniform(self._seed, self._sample_index, position, purpose)
