"""The block formats, bit for bit against the package `gguf`, on random bytes and on real files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.llm.loaders.base import DenseWeight, GroupedWeight
from backends.llm.loaders.gguf_file import open_gguf
from backends.llm.loaders.gguf_quants import FORMATS, dequantize, weight_from_bytes
from backends.llm.loaders.gguf_types import TYPES

gguf = pytest.importorskip("gguf")
from gguf.quants import dequantize as their_dequantize  # noqa: E402

BY_NAME = {t.name: t for t in TYPES.values()}
# Where the float16 numbers of a block stand, in bytes: random ones are often no numbers.
HALVES = {
    **{"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0]},
    **{"Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]},
}


def _random_blocks(name: str, count: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """Returns blocks of every bit pattern but for their scales, which are float16 numbers of all sizes."""
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (count, BY_NAME[name].block_bytes), dtype=np.uint8)
    for at in HALVES[name]:
        halves = (rng.standard_normal(count) * 10.0 ** rng.integers(-7, 4, count)).astype("<f2")
        blocks[:, at : at + 2] = halves.view(np.uint8).reshape(count, 2)
    return blocks


def _scales(name: str, blocks: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    at = HALVES[name][0]
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2")[:, 0].astype(np.float32)


def _same_bits(ours: np.ndarray[Any, Any], theirs: np.ndarray[Any, Any]) -> bool:
    return ours.dtype == theirs.dtype == np.float32 and ours.tobytes() == theirs.tobytes()


def test_sizes_are_those_of_the_package() -> None:
    for number, kind in TYPES.items():
        their = gguf.GGMLQuantizationType(number)
        assert (kind.name, kind.block_size, kind.block_bytes) == (their.name, *gguf.GGML_QUANT_SIZES[their])


@pytest.mark.parametrize("name", FORMATS)
def test_values_are_bit_for_bit_those_of_the_package(name: str) -> None:
    kind = BY_NAME[name]
    blocks = _random_blocks(name, 3000)
    shape = (300, 10 * kind.block_size)
    theirs = their_dequantize(blocks.reshape(300, -1), gguf.GGMLQuantizationType[name])
    assert np.isfinite(theirs).all() and len(np.unique(theirs)) > 10_000
    assert _same_bits(dequantize(blocks.reshape(-1), kind, shape), theirs)
    # A single wrong bit shows, in the block of the largest scale.
    largest = np.abs(_scales(name, blocks)).argmax()
    blocks[largest, -1 if name not in ("Q2_K", "Q3_K", "Q6_K") else 40] ^= 1
    assert not _same_bits(dequantize(blocks.reshape(-1), kind, shape), theirs)


@pytest.mark.parametrize("name", FORMATS)
def test_groups_give_the_same_values_in_float32(name: str) -> None:
    kind = BY_NAME[name]
    blocks = _random_blocks(name, 2000, seed=1)
    shape = (200, 10 * kind.block_size)
    weight = weight_from_bytes(blocks.reshape(-1), kind, shape)
    theirs = their_dequantize(blocks.reshape(200, -1), gguf.GGMLQuantizationType[name])
    if name == "Q6_K":  # its products need 25 bits: as groups it would be wrong by a last bit
        assert isinstance(weight, DenseWeight) and _same_bits(weight.array, theirs)
        return
    assert isinstance(weight, GroupedWeight)
    assert weight.codes.shape == shape and weight.codes.max() == 2**weight.bits - 1
    assert weight.scales.shape == weight.mins.shape == (200, shape[1] // weight.group_size)
    scales, mins = (np.repeat(a, weight.group_size, axis=1) for a in (weight.scales, weight.mins))
    assert np.array_equal(scales * weight.codes + mins, theirs)


def test_group_sizes_and_bits() -> None:
    found = {}
    for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K"):
        weight = weight_from_bytes(_random_blocks(name, 1).reshape(-1), BY_NAME[name], (1, BY_NAME[name].block_size))
        assert isinstance(weight, GroupedWeight)
        found[name] = (weight.bits, weight.group_size)
    assert found == {
        **{"Q4_0": (4, 32), "Q4_1": (4, 32), "Q5_0": (5, 32), "Q5_1": (5, 32), "Q8_0": (8, 32)},
        **{"Q2_K": (2, 16), "Q3_K": (3, 16), "Q4_K": (4, 32), "Q5_K": (5, 32)},
    }


def test_q4_1_by_hand() -> None:
    """One block: scale 0.5, minimum -2; byte i holds code i for value i and 15 - i for value i + 16."""
    halves = np.array([0.5, -2.0], "<f2").view(np.uint8)
    codes = np.arange(16, dtype=np.uint8)
    data = np.concatenate([halves, codes | (15 - codes) << 4])
    values = dequantize(data, BY_NAME["Q4_1"], (32,))
    assert values.tolist() == [0.5 * i - 2 for i in range(16)] + [0.5 * (15 - i) - 2 for i in range(16)]


def test_plain_numbers_keep_their_type() -> None:
    import ml_dtypes

    numbers = np.array([1.5, -0.25, 3.0, 1e-3])
    for name, dtype in (("F32", np.float32), ("F16", np.float16), ("BF16", ml_dtypes.bfloat16)):
        stored = numbers.astype(dtype)
        weight = weight_from_bytes(stored.view(np.uint8), BY_NAME[name], (2, 2))
        assert isinstance(weight, DenseWeight) and weight.array.dtype == dtype
        assert np.array_equal(weight.array.reshape(-1), stored)


def test_more_blocks_than_are_unpacked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from backends.llm.loaders import gguf_quants

    blocks = _random_blocks("Q4_K", 50)
    shape = (50, 256)
    whole = dequantize(blocks.reshape(-1), BY_NAME["Q4_K"], shape)
    groups = weight_from_bytes(blocks.reshape(-1), BY_NAME["Q4_K"], shape)
    monkeypatch.setattr(gguf_quants, "_BLOCKS_AT_ONCE", 7)
    assert np.array_equal(dequantize(blocks.reshape(-1), BY_NAME["Q4_K"], shape), whole)
    again = weight_from_bytes(blocks.reshape(-1), BY_NAME["Q4_K"], shape)
    assert isinstance(groups, GroupedWeight) and isinstance(again, GroupedWeight)
    assert all(np.array_equal(getattr(groups, f), getattr(again, f)) for f in ("codes", "scales", "mins"))


def _check_real(path: Path, parts: tuple[str, ...]) -> set[str]:
    """Compares the tensors whose names hold one of the parts; returns their types."""
    file, seen = open_gguf(path), set()
    for info in file.tensors.values():
        if any(part in info.name for part in parts):
            seen.add(info.type.name)
            data = file.read(info.name)
            stored = data.view("<f4") if info.type.name == "F32" else data
            theirs = their_dequantize(stored.reshape(*info.shape[:-1], -1), gguf.GGMLQuantizationType[info.type.name])
            assert _same_bits(dequantize(data, info.type, info.shape), theirs), info.name
    return seen


def test_tensors_of_a_real_file(smollm2: Path) -> None:
    assert _check_real(smollm2, ("token_embd", "output_norm", "blk.0.", "blk.29.")) == {"F32", "Q4_1", "Q8_0"}


def test_tensors_of_a_real_file_of_k_quants(gemma3: Path) -> None:
    assert _check_real(gemma3, ("blk.0.", "blk.9.", "blk.17.")) == {"F32", "Q5_0", "Q4_K", "Q6_K", "Q8_0"}
