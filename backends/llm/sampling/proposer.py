"""What proposes draft tokens for a step to verify: the interface, and a draft."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from backends.llm.engine.outputs import RequestId


@dataclass(frozen=True, slots=True)
class Draft:
    """Guesses of an answer's next tokens.

    Attributes:
        token_ids: in order; may be empty.
        probabilities: [len(token_ids), vocab_size], for each token the distribution that it was drawn from; None where
            the tokens were not drawn at random but looked up, or are the most likely ones.
    """

    token_ids: tuple[int, ...]
    probabilities: npt.NDArray[np.float32] | None = None

    def first(self, count: int) -> Draft:
        """Returns the draft cut to as many tokens as a step had room for."""
        rows = None if self.probabilities is None else self.probabilities[:count]
        return Draft(self.token_ids[:count], rows)


NO_DRAFT = Draft(())


class Proposer(Protocol):
    """Proposes drafts for several requests at once, so that a draft model can compute them in one batch.

    A proposer follows each request from `add` to `remove`; what the engine's target model did with a draft it learns
    from `append` alone, which gets the tokens that became part of the answer.
    """

    def add(self, request_id: RequestId, prompt_token_ids: Sequence[int]) -> None:
        """Begins to follow an answer; the work may be in proportion to the prompt."""
        ...

    def append(self, request_id: RequestId, token_ids: Sequence[int]) -> None:
        """Takes note of the next tokens of the answer."""
        ...

    def propose(self, num_drafts: Mapping[RequestId, int]) -> dict[RequestId, Draft]:
        """Returns a draft for each request, of at most so many tokens; the work does not grow with the text."""
        ...

    def remove(self, request_id: RequestId) -> None:
        """Forgets a request."""
        ...

    def close(self) -> None:
        """Frees what it has; nothing is asked of it any more."""
        ...
