"""From a row of logits to the tokens that may be drawn, and from a uniform number to one of them. Pure functions.

Order of operations, as vLLM documents it: temperature, min-p, top-k, top-p; each renormalises what the one before left.
Temperature keeps the order of tokens, and min-p and top-k each keep a beginning of that order, so these two commute,
and the cheaper one goes first.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from backends.llm.sampling.params import SamplingParams

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]

_GROUPS = 512  # groups whose maxima bound the k-th largest value
_BLOCK = 256  # weights summed at once when one is drawn
_FEW = 1024  # values that are sorted without a histogram
_LARGE_SHARE = 1e-4  # of the sum; finding the places of many values costs more than all exponentials


@dataclass(frozen=True, slots=True)
class Distribution:
    """Tokens that may be drawn.

    Attributes:
        token_ids: [size] ascending.
        weights: [size] float32, not negative, in proportion to the probabilities.
    """

    token_ids: Ids
    weights: Floats

    def probability(self, token_id: int) -> float:
        """Returns the probability of one token, 0 where it cannot be drawn."""
        index = int(np.searchsorted(self.token_ids, token_id))
        if index == len(self.token_ids) or self.token_ids[index] != token_id:
            return 0.0
        return float(self.weights[index]) / float(self.weights.sum(dtype=np.float64))


def largest(values: Floats, k: int) -> Ids:
    """Returns the indices of the k largest values, largest first, equal ones by lowest index.

    The maxima of groups of values bound the k-th largest from below (the k groups with the largest maxima hold k values
    that reach it), so only the few values above that bound are sorted.

    Args:
        values: [size], no NaN. -inf is never among the largest: fewer than k come back where there are not enough.
        k: 1 or more.
    """
    size = len(values)
    if k >= size:
        candidates = np.flatnonzero(values > -np.inf)
    else:
        if size >= 4 * _GROUPS and k <= _GROUPS // 2:
            whole = size - size % _GROUPS
            maxima = values[:whole].reshape(-1, _GROUPS).max(axis=0)
            bound = np.partition(maxima, _GROUPS - k)[_GROUPS - k]
        else:
            bound = np.partition(values, size - k)[size - k]
        candidates = np.flatnonzero(values >= bound if bound > -np.inf else values > bound)
    order = np.argsort(-values[candidates], kind="stable")[:k]
    best: Ids = candidates[order]
    return best


def token_distribution(logits: Floats, params: SamplingParams) -> Distribution:
    """Returns the distribution that temperature, min-p, top-k and top-p make of a row; top-k keeps exactly k tokens.

    Args:
        logits: [vocab_size], no NaN, the largest finite.
        params: with a temperature above 0.
    """
    token_ids = _all_ids(len(logits))
    if 0 < params.top_k < len(logits):
        token_ids = np.sort(largest(logits, params.top_k))
        logits = logits[token_ids]
    temperature = np.float32(min(max(params.temperature, 1e-30), 1e30))  # beyond, a float32 is 0 or infinite
    with np.errstate(over="ignore"):  # far below the largest is -inf, and so 0
        weights = logits - logits.max()  # in place from here on: one array of the vocabulary's size is enough
        if temperature != 1:
            weights *= np.float32(1) / temperature
    np.exp(weights, out=weights)
    if params.min_p > 0:
        kept = np.flatnonzero(weights >= params.min_p)  # the largest weight is 1
        token_ids, weights = token_ids[kept], weights[kept]
    if params.top_p < 1:
        kept = _nucleus(weights, params.top_p)
        token_ids, weights = token_ids[kept], weights[kept]
    return Distribution(token_ids, weights)


def draw(distribution: Distribution, number: float) -> int:
    """Returns the first token whose cumulative probability is above `number`, a value in [0, 1)."""
    weights = distribution.weights
    sums = np.add.reduceat(weights, np.arange(0, len(weights), _BLOCK))
    ends = np.cumsum(sums, dtype=np.float64)
    target = number * float(ends[-1])
    block = int(np.searchsorted(ends, target, side="right"))
    first = block * _BLOCK
    before = float(ends[block - 1]) if block else 0.0
    inside = weights[first : first + _BLOCK]
    index = int(np.searchsorted(before + np.cumsum(inside, dtype=np.float64), target, side="right"))
    if index == len(inside):  # the two ways to sum differ in their last bits
        index = int(np.flatnonzero(inside)[-1])
    return int(distribution.token_ids[first + index])


@lru_cache(maxsize=4)
def _all_ids(size: int) -> Ids:
    ids = np.arange(size, dtype=np.int64)
    ids.flags.writeable = False
    return ids


def _nucleus(weights: Floats, top_p: float) -> Ids:
    """Returns the ascending indices of the fewest largest weights that hold `top_p` of the sum.

    Mostly they are among the few that are large. Else weights so small that all of them together could not fill
    1 - top_p are left out before anything is sorted.
    """
    total = float(weights.sum())
    candidates = np.flatnonzero(weights >= _LARGE_SHARE * total)
    values = weights[candidates]
    if float(values.sum(dtype=np.float64)) < top_p * total:  # a flat distribution: more of them are needed
        candidates = np.flatnonzero(weights >= min(_LARGE_SHARE, (1 - top_p) / len(weights)) * total)
        values = weights[candidates]
    smallest, surplus = _edge(values, top_p * total)
    kept = values >= smallest
    if surplus:
        kept[np.flatnonzero(values == smallest)[-surplus:]] = False
    return candidates[kept]


def _edge(values: Floats, mass: float) -> tuple[np.float32, int]:
    """Returns the smallest of the fewest largest values that sum up to `mass`, and how many equal to it are too many.

    Of many values only those in the right bin of a histogram are sorted. The bits of a positive float are in the order
    of its value: its exponent and the first bits of its fraction are the number of its bin.
    """
    above = 0.0
    if len(values) > _FEW:
        bins = (values.view(np.int32) >> 17).astype(np.int64)  # 64 bins between two powers of two
        bins -= bins.min()
        masses = np.bincount(bins, weights=values.astype(np.float64))[::-1]  # six times slower with other types
        sums = np.cumsum(masses)
        place = min(int(np.searchsorted(sums, mass)), len(sums) - 1)
        above = float(sums[place] - masses[place])
        values = values[bins == len(sums) - 1 - place]
    ordered = np.sort(values)[::-1]
    index = min(int(np.searchsorted(above + np.cumsum(ordered, dtype=np.float64), mass)), len(ordered) - 1)
    smallest = ordered[index]
    return smallest, int(np.count_nonzero(ordered[index + 1 :] == smallest))
