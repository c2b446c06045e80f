"""What a loader hands over: configuration, weights by Hugging Face's names, the tokenizer's files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backends.llm.models.config import DecoderConfig
from compiler.errors import ModelRefused

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True)
class DenseWeight:
    """A tensor stored as it is computed with.

    Attributes:
        array: [...] float32, float16 or ml_dtypes.bfloat16; may be a view of a mapped file.
    """

    array: npt.NDArray[Any]


@dataclass(frozen=True)
class GroupedWeight:
    """A matrix of integer codes: value[o, i] = scales[o, g] * codes[o, i] + mins[o, g], with g = i // group_size.

    Attributes:
        codes: [out, in] uint8, below 2 ** bits.
        scales: [out, in // group_size] float32.
        mins: [out, in // group_size] float32.
    """

    codes: npt.NDArray[np.uint8]
    scales: npt.NDArray[np.float32]
    mins: npt.NDArray[np.float32]
    bits: int
    group_size: int


Weight = DenseWeight | GroupedWeight


@dataclass(frozen=True)
class LoadedModel:
    """A model read from disk.

    Attributes:
        weights: by the names of Hugging Face ("model.layers.0.self_attn.q_proj.weight") and in its layout (rotate-half
            rotary pairs, [out, in] matrices); read when asked for, so that no more than one copy is in memory.
        quantization: what most of the matrices are stored as: "F32", "BF16", "Q4_1", ...
        source: the file or folder, and its sha256 by file name, for the fingerprint.
    """

    config: DecoderConfig
    weights: Mapping[str, Weight]
    quantization: str
    source: Mapping[str, str]


def no_model(path: Path, allowed: str) -> ModelRefused:
    """Returns the refusal of a path that is none of what is allowed; many mean a name on the hub."""
    if not path.exists():
        return ModelRefused(
            f"{path} does not exist",
            hint="models are read from disk and never downloaded; fetch one first: hf download NAME --local-dir FOLDER",
        )
    return ModelRefused(f"{path} is no model; allowed: {allowed}")
