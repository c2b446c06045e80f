"""Log probabilities against float64, ranks, and those of a prompt."""

from __future__ import annotations

import numpy as np
import pytest

from backends.llm.errors import LogitsError
from backends.llm.sampling.logprobs import prompt_logprobs, token_logprobs


def test_values_ranks_and_ties_of_a_small_row() -> None:
    row = np.log(np.array([0.1, 0.4, 0.1, 0.4], dtype=np.float32))
    entry = token_logprobs(row, 2, 3)
    assert entry.logprob == pytest.approx(np.log(0.1), abs=1e-6)
    assert entry.rank == 4
    assert [i for i, _ in entry.top] == [1, 3, 0]
    assert [p for _, p in entry.top] == pytest.approx(np.log([0.4, 0.4, 0.1]).tolist(), abs=1e-6)
    assert [token_logprobs(row, i, 0).rank for i in range(4)] == [3, 1, 4, 2]


def test_large_logits_do_not_overflow() -> None:
    row = np.array([1e30, 1e30, -1e30], dtype=np.float32)
    assert token_logprobs(row, 1, 0).logprob == pytest.approx(-np.log(2))


def test_g23_prompt_logprobs_have_full_length_and_are_the_same_in_chunks() -> None:
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 3000, 25).tolist()
    logits = rng.normal(size=(25, 3000)).astype(np.float32)
    # Row i was computed at token i and speaks of token i + 1; the last row is for the answer.
    whole = prompt_logprobs(logits[:-1], prompt[1:], 4)
    chunks = [prompt_logprobs(logits[i : min(i + 7, 24)], prompt[i + 1 : i + 8], 4) for i in range(0, 24, 7)]
    assert sum(chunks, ()) == whole
    assert [entry.token_id for entry in whole] == prompt[1:]
    exact = logits[:-1].astype(np.float64)
    exact -= np.log(np.exp(exact).sum(axis=1, keepdims=True))
    assert [e.logprob for e in whole] == pytest.approx([exact[i, prompt[i + 1]] for i in range(24)], abs=1e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_bad_logits_are_an_error(bad: float) -> None:
    with pytest.raises(LogitsError, match="largest logit is"):
        prompt_logprobs(np.array([[0.0, bad]], dtype=np.float32), [0], 0)
