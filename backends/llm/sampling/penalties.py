"""TokenCounts: how often each token stands in an answer, kept up token by token, and the penalties that follow."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from backends.llm.sampling.params import SamplingParams


class TokenCounts:
    """The tokens that were seen and how often in the answer; a step costs their number, not the length of the text."""

    def __init__(self, prompt_token_ids: Iterable[int]) -> None:
        seen = sorted(set(prompt_token_ids))
        self._slots = {token_id: slot for slot, token_id in enumerate(seen)}
        self._token_ids = np.array(seen, dtype=np.int64)
        self._counts = np.zeros(len(seen), dtype=np.float32)

    def add(self, token_id: int) -> None:
        """Counts one more token of the answer."""
        slot = self._slots.get(token_id)
        if slot is None:
            slot = self._slots[token_id] = len(self._slots)
            if slot == len(self._token_ids):
                room = np.zeros(max(64, slot), dtype=np.int64)
                self._token_ids = np.concatenate([self._token_ids, room])
                self._counts = np.concatenate([self._counts, room.astype(np.float32)])
            self._token_ids[slot] = token_id
        self._counts[slot] += 1

    def penalise(self, logits: npt.NDArray[np.float32], params: SamplingParams) -> None:
        """Applies the three penalties in place, as vLLM and the OpenAI API define them.

        repetition: a logit above 0 is divided by it, another multiplied. frequency: times the count, subtracted.
        presence: subtracted once.

        Args:
            logits: [vocab_size], written.
            params: the penalties.
        """
        size = len(self._slots)
        token_ids, counts = self._token_ids[:size], self._counts[:size]
        values = logits[token_ids]
        penalty = np.float32(params.repetition_penalty)
        values = np.where(values > 0, values / penalty, values * penalty)
        values -= np.float32(params.frequency_penalty) * counts
        values -= np.float32(params.presence_penalty) * (counts > 0)
        logits[token_ids] = values
