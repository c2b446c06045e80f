"""Temperature, min-p, top-k, top-p and the draw, against loops and against transformers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from backends.llm.sampling.distribution import Distribution, draw, largest, token_distribution
from backends.llm.sampling.params import SamplingParams
from tests.backends.llm.sampling import plain

Floats = npt.NDArray[np.float32]


def as_probabilities(distribution: Distribution) -> dict[int, float]:
    total = float(distribution.weights.sum(dtype=np.float64))
    pairs = zip(distribution.token_ids.tolist(), distribution.weights.tolist(), strict=True)
    return {token_id: weight / total for token_id, weight in pairs if weight > 0}


def random_logits(seed: int, size: int, *, scale: float = 4.0, levels: int | None = None) -> Floats:
    """With `levels`, values repeat, so that ties are everywhere."""
    rng = np.random.default_rng(seed)
    if levels is not None:
        return rng.integers(-levels, levels + 1, size).astype(np.float32)
    return (scale * rng.normal(size=size)).astype(np.float32)


@given(st.integers(0, 2**32), st.sampled_from([1, 7, 300, 2047, 2048, 2500, 5000]), st.data())
def test_largest_is_a_stable_sort_cut_off(seed: int, size: int, data: st.DataObject) -> None:
    levels = data.draw(st.sampled_from([None, 1, 3]))
    k = data.draw(st.integers(1, size + 2))
    values = random_logits(seed, size, levels=levels)
    masked = data.draw(st.sampled_from([0.0, 0.5, 0.999]))
    values[np.random.default_rng(seed).random(size) < masked] = -np.inf
    expected = [i for i in sorted(range(size), key=lambda i: (-values[i], i)) if values[i] > -np.inf][:k]
    assert largest(values, k).tolist() == expected


@given(
    st.integers(0, 2**32),
    st.sampled_from([2, 5, 40, 300, 2100]),
    st.sampled_from([0, 1, 2, 7, 50, 10**6]),
    st.sampled_from([1.0, 0.95, 0.5, 0.011]),
    st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    st.sampled_from([0.3, 1.0, 3.7]),
)
def test_the_distribution_is_that_of_the_loops(
    seed: int, size: int, top_k: int, top_p: float, min_p: float, temperature: float
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    logits = random_logits(seed, size)
    assume(_no_close_call(logits, params))
    seen = as_probabilities(token_distribution(logits, params))
    expected = {i: p for i, p in plain.probabilities(logits.tolist(), params).items() if p > 1e-30}
    assert {i for i, p in seen.items() if p > 1e-30} == set(expected)
    assert [seen[i] for i in expected] == pytest.approx(list(expected.values()), rel=1e-4, abs=1e-9)


def _no_close_call(logits: Floats, params: SamplingParams) -> bool:
    """A sum or a ratio within rounding of its limit may fall to either side."""
    for nudged in (1 - 1e-5, 1 + 1e-5):
        top_p, min_p = min(1.0, params.top_p * nudged), min(1.0, params.min_p * nudged)
        if params.top_p == 1:
            top_p = 1.0
        if params.min_p == 1:
            continue
        moved = SamplingParams(temperature=params.temperature, top_k=params.top_k, top_p=top_p, min_p=min_p)
        if len(plain.probabilities(logits.tolist(), moved)) != len(plain.probabilities(logits.tolist(), params)):
            return False
    return True


@pytest.mark.parametrize("top_k", [1, 5, 50, 300])
@pytest.mark.parametrize("top_p", [0.3, 0.9, 1.0])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_the_distribution_is_that_of_transformers(top_k: int, top_p: float, temperature: float) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    logits = random_logits(top_k, 5000)
    processors = transformers.LogitsProcessorList(
        [
            transformers.TemperatureLogitsWarper(temperature),
            transformers.TopKLogitsWarper(top_k),
            transformers.TopPLogitsWarper(top_p),
        ]
    )
    scores = torch.softmax(processors(None, torch.from_numpy(logits)[None])[0].double(), dim=0).numpy()
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
    seen = as_probabilities(token_distribution(logits, params))
    assert sorted(seen) == np.flatnonzero(scores).tolist()
    assert [seen[i] for i in sorted(seen)] == pytest.approx(scores[scores > 0].tolist(), rel=1e-4)


@pytest.mark.parametrize("min_p", [0.001, 0.1, 1.0])
def test_min_p_is_that_of_transformers(min_p: float) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    logits = random_logits(3, 5000)
    scores = transformers.MinPLogitsWarper(min_p)(None, torch.from_numpy(logits)[None] / 1.5)[0]
    seen = as_probabilities(token_distribution(logits, SamplingParams(temperature=1.5, min_p=min_p)))
    assert sorted(seen) == torch.isfinite(scores).nonzero()[:, 0].tolist()


def test_ties_at_the_edge_of_top_k_and_top_p_go_to_the_lowest_ids() -> None:
    logits = np.zeros(3000, dtype=np.float32)
    logits[[7, 100, 2999]] = 1.0
    assert token_distribution(logits, SamplingParams(temperature=1.0, top_k=2)).token_ids.tolist() == [7, 100]
    assert token_distribution(logits, SamplingParams(temperature=1.0, top_k=5)).token_ids.tolist() == [
        0,
        1,
        7,
        100,
        2999,
    ]
    half = token_distribution(np.zeros(3000, dtype=np.float32), SamplingParams(temperature=1.0, top_p=0.5))
    assert half.token_ids.tolist() == list(range(1500))


def test_a_nucleus_of_many_thousand_tokens_is_found_by_the_full_sort() -> None:
    logits = random_logits(1, 49_152, scale=0.5)
    params = SamplingParams(temperature=1.0, top_p=0.9)
    seen = token_distribution(logits, params)
    order = np.argsort(-logits, kind="stable")
    mass = np.cumsum(np.exp(logits[order].astype(np.float64)))
    count = int(np.count_nonzero(mass < 0.9 * mass[-1])) + 1
    assert count > 20_000
    assert seen.token_ids.tolist() == np.sort(order[:count]).tolist()


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-6])
def test_a_tiny_temperature_leaves_the_largest(temperature: float) -> None:
    logits = np.array([1.0, 3.0, 2.0, -np.inf], dtype=np.float32)
    assert as_probabilities(token_distribution(logits, SamplingParams(temperature=temperature))) == {1: 1.0}


def test_a_huge_temperature_is_uniform_over_what_is_allowed() -> None:
    logits = np.array([1.0, 3.0, -np.inf, 2.0], dtype=np.float32)
    seen = as_probabilities(token_distribution(logits, SamplingParams(temperature=1e300)))
    assert seen == pytest.approx({0: 1 / 3, 1: 1 / 3, 3: 1 / 3})


def test_the_row_is_not_written() -> None:
    logits = random_logits(0, 3000)
    logits.flags.writeable = False
    token_distribution(logits, SamplingParams(temperature=0.7, top_k=9, top_p=0.9, min_p=0.01))


@given(st.lists(st.sampled_from([0.0, 1e-30, 0.25, 0.5, 1.0, 3.0]), min_size=1, max_size=700), st.floats(0, 1))
def test_a_draw_is_the_inverse_of_the_cumulative_sum(weights: list[float], number: float) -> None:
    assume(any(weights) and number < 1)
    distribution = Distribution(np.arange(len(weights)) * 2, np.array(weights, dtype=np.float32))
    token_id = draw(distribution, number)
    assert weights[token_id // 2] > 0
    cumulative = np.cumsum(np.array(weights, dtype=np.float32), dtype=np.float64)
    index = token_id // 2
    before = cumulative[index] - weights[index]
    assert before - 1e-6 <= number * cumulative[-1] <= cumulative[index] + 1e-6


@pytest.mark.parametrize("number", [0.0, 0.5, 1 - 2.0**-53])
def test_a_draw_never_gives_a_token_of_weight_zero(number: float) -> None:
    weights = np.zeros(49_152, dtype=np.float32)
    weights[[300, 30_000, 40_000]] = 1e-7, 1.0, 1e-7
    assert draw(Distribution(np.arange(49_152), weights), number) in (300, 30_000, 40_000)


def test_draws_have_the_frequencies_of_the_weights() -> None:
    weights = np.linspace(0, 1, 1000, dtype=np.float32)
    distribution = Distribution(np.arange(1000), weights)
    count = 100_000
    numbers = (np.arange(count) + 0.5) / count
    drawn = np.bincount([draw(distribution, float(number)) for number in numbers], minlength=1000)
    assert np.abs(drawn - count * weights / weights.sum()).max() <= 1.01
