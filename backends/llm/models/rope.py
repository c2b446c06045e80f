"""Rotary frequencies, with the scalings for long contexts; numpy only, so that every runner uses the same numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from backends.llm.models.config import DecoderConfig, RopeScaling
from compiler.errors import ModelRefused

if TYPE_CHECKING:
    import numpy.typing as npt

_KINDS = ("linear", "llama3", "yarn", "dynamic", "divisors")


@dataclass(frozen=True)
class Rotation:
    """How the heads of one layer are rotated: pair i of position p by the angle p * frequencies[i].

    Attributes:
        frequencies: [head_dim / 2] float32, radians per position.
        magnitude: what cosine and sine are multiplied with.
    """

    frequencies: npt.NDArray[np.float32]
    magnitude: float = 1.0


def rotation(config: DecoderConfig, *, windowed: bool) -> Rotation:
    """Returns the rotation of windowed layers or of those that see everything.

    Raises:
        ModelRefused: a scaling of an unknown kind.
    """
    if windowed and config.local_rope_theta is not None:
        return Rotation(_plain(config.local_rope_theta, config.head_dim).astype(np.float32))
    frequencies, scaling = _plain(config.rope_theta, config.head_dim), config.rope_scaling
    if scaling is None or scaling.kind == "dynamic":
        # "dynamic" changes frequencies beyond the positions that the model was made for, which no runner goes to.
        return Rotation(frequencies.astype(np.float32))
    if scaling.kind == "linear":
        return Rotation((frequencies / scaling.factor).astype(np.float32))
    if scaling.kind == "divisors":
        return Rotation((frequencies / np.asarray(scaling.divisors)).astype(np.float32))
    if scaling.kind == "llama3":
        return Rotation(_llama3(frequencies, scaling).astype(np.float32))
    if scaling.kind == "yarn":
        scaled = _yarn(frequencies, scaling, config.rope_theta, config.head_dim)
        magnitude = scaling.attention_factor
        return Rotation(scaled.astype(np.float32), _yarn_magnitude(scaling.factor) if magnitude is None else magnitude)
    raise ModelRefused(f"rope scaling {scaling.kind!r} is not supported; allowed: {', '.join(_KINDS)}")


def _plain(theta: float, head_dim: int) -> npt.NDArray[np.float64]:
    return np.asarray(theta ** -(np.arange(0, head_dim, 2) / head_dim), dtype=np.float64)


def _llama3(frequencies: npt.NDArray[np.float64], s: RopeScaling) -> npt.NDArray[np.float64]:
    """Long waves are stretched, short ones kept, those between blended (the reference code of Llama 3.1)."""
    turns = s.original_max_position_embeddings * frequencies / (2 * math.pi)
    kept: npt.NDArray[np.float64] = np.clip(
        (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor), 0, 1
    )
    return frequencies * (kept + (1 - kept) / s.factor)


def _yarn(frequencies: npt.NDArray[np.float64], s: RopeScaling, theta: float, head_dim: int) -> npt.NDArray[np.float64]:
    """Pairs that turn often keep their frequency, those that turn seldom are stretched (arXiv 2309.00071)."""

    def pair_that_turns(times: float) -> float:
        waves = s.original_max_position_embeddings / (times * 2 * math.pi)
        return head_dim * math.log(waves) / (2 * math.log(theta))

    low = max(math.floor(pair_that_turns(s.high_freq_factor)), 0)
    high = min(math.ceil(pair_that_turns(s.low_freq_factor)), head_dim - 1)
    stretched = np.clip((np.arange(head_dim // 2) - low) / (high - low if high > low else 0.001), 0, 1)
    return frequencies * (1 - stretched + stretched / s.factor)


def _yarn_magnitude(factor: float) -> float:
    return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
