"""sample(): every operation against loops, batches, randomness, bad logits, log probabilities."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.llm.errors import LogitsError
from backends.llm.sampling.distribution import draw, token_distribution
from backends.llm.sampling.params import SamplingParams
from backends.llm.sampling.proposer import Draft
from backends.llm.sampling.randomness import Purpose, uniform
from backends.llm.sampling.sampler import Sampled, SampleRequest, sample
from backends.llm.sampling.state import SamplerState
from tests.backends.llm.sampling import plain
from tests.backends.llm.sampling.steps import decode, packed, rows, started, tokens

# --- greedy


def test_g21_top_k_1_is_greedy_to_the_last_tie() -> None:
    logits = rows(0, 200, 3000)
    logits[:, 77] = logits[:, 2900] = 50.0  # two winners in every row
    greedy = decode(logits, SamplingParams(temperature=0.0))
    assert greedy == [77] * 200
    assert decode(logits, SamplingParams(temperature=1.3, top_k=1, seed=5)) == greedy
    assert decode(logits, SamplingParams(temperature=0.0, top_k=40, top_p=0.5, min_p=0.1)) == greedy


@given(st.integers(0, 1000), st.sampled_from([2, 50, 2100]))
@settings(max_examples=30)
def test_g21_top_k_1_is_greedy_for_any_row(seed: int, vocab_size: int) -> None:
    logits = np.round(rows(seed, 5, vocab_size))
    assert decode(logits, SamplingParams(temperature=0.9, top_k=1)) == logits.argmax(axis=1).tolist()


def test_a_greedy_block_costs_little_more_than_its_argmax() -> None:
    logits = rows(0, 32, 49_152)
    states = [started(SamplingParams()) for _ in range(32)]
    requests = [SampleRequest(state) for state in states]

    def seconds(of_sample: bool) -> float:
        begin = time.perf_counter()
        sample(logits, requests) if of_sample else [int(row.argmax()) for row in logits]
        return time.perf_counter() - begin

    times = [(seconds(True), seconds(False)) for _ in range(60)]
    ratio = min(ours for ours, _ in times) / min(theirs for _, theirs in times)
    assert ratio < 5, ratio  # a copy or a sort of the block is 10 times its argmax and more


# --- each operation against the loops


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    top_k=st.sampled_from([0, 3, 20]),
    top_p=st.sampled_from([1.0, 0.85]),
    min_p=st.sampled_from([0.0, 0.05]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.9, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.4, -0.3]),
    min_tokens=st.sampled_from([0, 4]),
    logit_bias=st.sampled_from([{}, {5: 4.0, 9: -100.0}]),
)


@given(PARAMS, st.integers(0, 10_000), st.booleans())
@settings(max_examples=150)
def test_an_answer_is_that_of_the_loops(params: SamplingParams, seed: int, with_grammar: bool) -> None:
    vocab_size, prompt, stop_token_ids = 40, (1, 2, 2, 5), (0, 7)
    logits = rows(seed, 8, vocab_size)
    rng = np.random.default_rng(seed + 1)
    state = SamplerState(params, prompt, seed=seed, sample_index=2, stop_token_ids=stop_token_ids)
    answer: list[int] = []
    for row in logits:
        allowed = rng.random(vocab_size) < 0.5
        allowed[20] = True
        mask = packed(allowed[None]) if with_grammar else None
        (seen,) = sample(row[None], [SampleRequest(state, allowed_tokens=mask)])
        assert isinstance(seen, Sampled)
        values = plain.adjusted(
            row.tolist(), params, prompt, answer, stop_token_ids, allowed.tolist() if with_grammar else None
        )
        if params.temperature == 0:
            assert values[seen.token_ids[0]] >= max(values) - 1e-5
        else:
            left = plain.probabilities(values, params)
            number = uniform(seed, 2, len(prompt) + len(answer), Purpose.TOKEN)
            assert seen.token_ids[0] in _drawn(left, number), (left, number)
        answer.append(seen.token_ids[0])


def _drawn(probabilities: dict[int, float], number: float) -> set[int]:
    """The token of a number, and its neighbour where the number is within rounding of the edge."""
    ids = sorted(probabilities)
    ends = np.cumsum([probabilities[token_id] for token_id in ids])
    return {ids[min(int(np.searchsorted(ends, number + nudge)), len(ids) - 1)] for nudge in (-1e-5, 0, 1e-5)}


def test_the_order_of_operations_shows_in_the_result() -> None:
    logits = np.array([[1.5, -1.0, 1.2]], dtype=np.float32)
    params = SamplingParams(repetition_penalty=2.0, logit_bias={1: 4.0})
    # Bias first: -1 + 4 = 3, divided 1.5, a tie with token 0. Penalty first: -1 * 2 + 4 = 2, and token 1 would win.
    assert decode(logits, params, prompt=(1,)) == [0]


def test_penalties_are_those_of_transformers_for_the_repetition_penalty() -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    logits = rows(4, 1, 500)
    prompt = (1, 5, 5, 499)
    processor = transformers.RepetitionPenaltyLogitsProcessor(1.7)
    expected = processor(torch.tensor([prompt]), torch.from_numpy(logits.copy()))[0].numpy()
    seen = logits[0].copy()
    started(SamplingParams(repetition_penalty=1.7), prompt).adjust(seen)
    np.testing.assert_array_equal(seen, expected)


def test_min_tokens_is_that_of_transformers() -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    logits = rows(4, 4, 50)
    logits[:, 7] = 100.0
    processor = transformers.MinNewTokensLengthLogitsProcessor(1, 3, [7], device="cpu")
    ids = [1]
    for row in logits:
        ids.append(int(processor(torch.tensor([ids]), torch.from_numpy(row.copy())[None])[0].argmax()))
    assert decode(logits, SamplingParams(min_tokens=3), prompt=(1,), stop_token_ids=(7,)) == ids[1:]
    assert ids[4] == 7 and 7 not in ids[1:4]


def test_counts_stay_right_over_a_thousand_tokens() -> None:
    params = SamplingParams(repetition_penalty=1.1, frequency_penalty=0.01, presence_penalty=0.3)
    state = started(params, (3, 3, 900))
    answer = np.random.default_rng(0).integers(0, 300, 1000).tolist()
    for token_id in answer:
        state.append(token_id)
    logits = rows(1, 1, 1000)[0]
    seen = logits.copy()
    state.adjust(seen)
    expected = plain.adjusted(logits.tolist(), params, (3, 3, 900), answer)
    np.testing.assert_allclose(seen, expected, rtol=1e-5, atol=1e-5)


# --- randomness


def test_tokens_do_not_depend_on_batch_mates_or_their_order() -> None:
    logits = rows(0, 6, 500)
    params = [SamplingParams(temperature=0.5 + i, top_k=20 * i, seed=i) for i in range(6)]
    alone = [tokens(sample(logits[i : i + 1], [SampleRequest(started(params[i]))]))[0] for i in range(6)]
    order = [4, 0, 5, 2, 1, 3]
    together = tokens(sample(logits[order], [SampleRequest(started(params[i])) for i in order]))
    assert together == [alone[i] for i in order]


def test_an_answer_that_is_continued_from_its_middle_is_the_same() -> None:
    """Numbers belong to positions: what was sampled before, and when, does not matter."""
    logits = rows(0, 20, 500)
    params = SamplingParams(temperature=1.0, seed=3, presence_penalty=0.0)
    whole = decode(logits, params, prompt=(1, 2))
    assert decode(logits[8:], params, prompt=(1, 2, *whole[:8])) == whole[8:]


def test_seeds_and_answers_differ_and_repeat() -> None:
    logits = rows(0, 40, 500, scale=0.1)
    first = decode(logits, SamplingParams(temperature=1.0, seed=1))
    assert decode(logits, SamplingParams(temperature=1.0, seed=1)) == first
    assert decode(logits, SamplingParams(temperature=1.0, seed=2)) != first
    second_answer = decode(logits, SamplingParams(temperature=1.0, seed=1), sample_index=1)
    assert second_answer != first
    assert second_answer != decode(logits, SamplingParams(temperature=1.0, seed=2))  # not the neighbour's first


def test_many_answers_follow_the_distribution() -> None:
    logits = np.log(np.array([[0.5, 0.3, 0.2]], dtype=np.float32))
    count = 20_000
    params = SamplingParams(temperature=1.0)
    block = np.repeat(logits, count, axis=0)
    requests = [SampleRequest(SamplerState(params, (1,), seed=seed)) for seed in range(count)]
    drawn = np.bincount([t[0] for t in tokens(sample(block, requests))], minlength=3) / count
    assert drawn == pytest.approx([0.5, 0.3, 0.2], abs=4 * 0.5 / count**0.5)


# --- bad logits


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_logits_end_their_own_request_only(bad: float, temperature: float) -> None:
    logits = rows(0, 3, 100)
    expected = decode(logits[2:], SamplingParams(temperature=temperature, seed=1))
    logits[1, 50] = bad
    params = SamplingParams(temperature=temperature, seed=1)
    results = sample(logits, [SampleRequest(started(params)) for _ in range(3)])
    assert isinstance(results[1], LogitsError)
    assert str(results[1]) == f"the model's largest logit is {bad}, at token 50; it must be finite"
    assert isinstance(results[0], Sampled)
    assert isinstance(results[2], Sampled) and list(results[2].token_ids) == expected


def test_minus_infinity_everywhere_is_an_error_and_somewhere_is_not() -> None:
    logits = np.full((2, 10), -np.inf, dtype=np.float32)
    logits[1, 6] = -5.0
    for params in (SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_k=4)):
        results = sample(logits, [SampleRequest(started(params)), SampleRequest(started(params))])
        assert isinstance(results[0], LogitsError)
        assert results[1] == Sampled((6,))


def test_a_grammar_that_only_allows_the_end_before_min_tokens_is_an_error() -> None:
    allowed = np.zeros((1, 10), dtype=bool)
    allowed[0, 7] = True
    state = started(SamplingParams(min_tokens=2), stop_token_ids=(7,))
    (result,) = sample(rows(0, 1, 10), [SampleRequest(state, allowed_tokens=packed(allowed))])
    assert isinstance(result, LogitsError)
    assert "min_tokens 2" in result.message


def test_the_logits_are_not_written() -> None:
    logits = rows(0, 2, 100)
    logits.flags.writeable = False
    params = SamplingParams(temperature=1.0, top_p=0.9, frequency_penalty=1.0, logit_bias={1: 3.0}, logprobs=2)
    mask = packed(np.ones((2, 100), dtype=bool))
    sample(logits, [SampleRequest(started(params), Draft((1,)), mask)][:1])


# --- logprobs


def test_g35_logprobs_are_absent_unless_asked_for_and_of_the_models_own_logits() -> None:
    logits = rows(0, 1, 100)
    (result,) = sample(logits, [SampleRequest(started(SamplingParams()))])
    assert isinstance(result, Sampled) and result.logprobs is None
    params = SamplingParams(temperature=0.3, top_k=5, logit_bias={8: 100.0}, logprobs=3, seed=0)
    (result,) = sample(logits, [SampleRequest(started(params))])
    assert isinstance(result, Sampled) and result.logprobs is not None
    exact = logits[0].astype(np.float64)
    exact -= np.log(np.exp(exact).sum())
    (entry,) = result.logprobs
    assert entry.token_id == 8
    assert entry.logprob == pytest.approx(exact[8], abs=1e-5)
    assert entry.rank == 1 + int((exact > exact[8]).sum())
    assert [i for i, _ in entry.top] == np.argsort(-exact)[:3].tolist()
    assert [p for _, p in entry.top] == pytest.approx(np.sort(exact)[::-1][:3].tolist(), abs=1e-5)


def test_each_accepted_draft_has_its_logprobs() -> None:
    logits = rows(0, 3, 100)
    best = logits.argmax(axis=1).tolist()
    (result,) = sample(logits, [SampleRequest(started(SamplingParams(logprobs=0)), Draft((best[0], best[1])))])
    assert isinstance(result, Sampled) and result.logprobs is not None
    assert [(entry.token_id, entry.rank, entry.top) for entry in result.logprobs] == [(i, 1, ()) for i in best]


def test_a_draw_uses_the_number_of_its_position() -> None:
    logits = rows(9, 1, 200)
    params = SamplingParams(temperature=1.0, seed=11)
    number = uniform(11, 0, 3, Purpose.TOKEN)
    expected = draw(token_distribution(logits[0], params), number)
    assert decode(logits, params, prompt=(4, 4, 4)) == [expected]
