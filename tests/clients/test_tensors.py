"""Tensors as bytes: by hand, against tritonclient's own, and how long byte strings take beside floats."""

from __future__ import annotations

import statistics
import struct
import time
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor

from clients import EncodedBytes, InputError, ModelMetadata, TensorMetadata, encode_fixed_width
from clients.requests import build_request
from clients.tensors import decode_array, decode_items, decode_values, encode_array, encode_items


def test_by_hand() -> None:
    assert encode_array(np.array([1, 258], np.int16), "INT16") == b"\x01\x00\x02\x01"
    assert encode_array(np.array([1, 258], ">i2"), "INT16") == b"\x01\x00\x02\x01"
    assert encode_array(np.array([[1, 2], [3, 4]], np.uint8).T, "UINT8") == b"\x01\x03\x02\x04"
    assert encode_array(np.array([1.0, -2.0], np.float32), "BF16") == b"\x80\x3f\x00\xc0"
    text = np.array([[b"ab\x00", b""]], dtype=object)
    assert encode_array(text, "BYTES") == b"\x03\x00\x00\x00ab\x00\x00\x00\x00\x00"
    assert decode_array(b"\x01\x00\x02\x01", "INT16", (2, 1)).tolist() == [[1], [258]]
    assert decode_array(b"", "BYTES", (0,)).shape == (0,)
    assert decode_values(b"\x01\x00\x00\x00a\x00\x00\x00\x00", "BYTES") == ["a", ""]
    assert decode_values(b"\x07\x00\x00\x00", "UINT32") == [7]


@given(st.lists(st.binary(max_size=300)))
def test_byte_strings_as_tritonclient_writes_and_reads_them(items: list[bytes]) -> None:
    array = np.empty(len(items), dtype=object)
    array[:] = items
    raw = encode_items(items)
    assert raw == (serialize_byte_tensor(array).item() if items else b"")
    assert decode_items(raw) == items == deserialize_bytes_tensor(raw).tolist()


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1))
def test_bfloat16_is_rounded_as_ml_dtypes_rounds_it(bits: list[int]) -> None:
    values = np.array(bits, np.uint32).view(np.float32)
    ours = decode_array(encode_array(values, "BF16"), "BF16", values.shape)
    with np.errstate(all="ignore"):
        theirs = values.astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(ours, theirs)  # NaN is equal to NaN here


@pytest.mark.parametrize("raw", [b"\x01", b"\x02\x00\x00\x00a", b"\x00\x00\x00\x00\x01\x00"])
def test_lengths_that_do_not_fit_are_errors(raw: bytes) -> None:
    with pytest.raises(ValueError, match="end within"):
        decode_items(raw)


def test_contents_that_do_not_fit_are_errors() -> None:
    with pytest.raises(ValueError):
        decode_array(b"\x00" * 7, "FP32", (2,))
    with pytest.raises(ValueError, match="'FP4' is unknown"):
        decode_array(b"", "FP4", (0,))


def test_c18_fixed_width_keeps_or_drops_zero_bytes_as_it_is_told() -> None:
    array = np.array([[b"ab\x00", b""], [b"abc", b"\x00a"]], dtype="S3")
    assert encode_fixed_width(array, keep_zeros=True) == EncodedBytes(
        (2, 2), encode_items([b"ab\x00", b"\x00\x00\x00", b"abc", b"\x00a\x00"])
    )
    assert encode_fixed_width(array, keep_zeros=False).data == encode_items([b"ab", b"", b"abc", b"\x00a"])
    assert (
        encode_fixed_width(array.T, keep_zeros=True).data[4:7]
        + encode_fixed_width(array.T, keep_zeros=True).data[11:14]
        == b"ab\x00abc"
    )
    with pytest.raises(InputError, match="not object"):
        encode_fixed_width(array.astype(object), keep_zeros=True)


def test_encoded_bytes_are_checked_like_others() -> None:
    model = ModelMetadata("m", ("1",), (TensorMetadata("X", "FP32", (-1,)), TensorMetadata("T", "BYTES", (2,))), ())
    encoded = EncodedBytes((2,), encode_items([b"a", b"b"]))
    request = build_request(model, {"X": [1.0], "T": encoded}, None)
    assert request.inputs[1].data == encoded.data
    with pytest.raises(InputError, match="'X' is FP32; EncodedBytes are for BYTES alone"):
        build_request(model, {"X": encoded, "T": encoded}, None)
    with pytest.raises(InputError, match="the model wants 2"):
        build_request(model, {"X": [1.0], "T": EncodedBytes((1,), b"\x00\x00\x00\x00")}, None)


def seconds(*actions: Callable[[], object], rounds: int = 15) -> list[float]:
    """The median processor seconds of each, in turn."""
    found: list[list[float]] = [[] for _ in actions]
    for _ in range(rounds):
        for action, times in zip(actions, found, strict=True):
            start = time.process_time_ns()
            action()
            times.append((time.process_time_ns() - start) / 1e9)
    return [statistics.median(times) for times in found]


def test_f11_a_fixed_width_array_costs_what_floats_cost(capsys: pytest.CaptureFixture[str]) -> None:
    """(64, 256) of S5 beside floats: 300 times as long was reported."""
    model = ModelMetadata(
        "m", ("1",), (TensorMetadata("F", "FP32", (-1, 256)), TensorMetadata("T", "BYTES", (-1, 256))), ()
    )
    floats = np.random.default_rng(0).random((64, 256), np.float32)
    strings = np.array([struct.pack("<I", n) + b"x" for n in range(64 * 256)], dtype="S5").reshape(64, 256)
    objects = strings.astype(object)
    assert serialize_byte_tensor(objects).item() == encode_array(objects, "BYTES")
    encoded = encode_fixed_width(strings, keep_zeros=True)

    def request(**inputs: object) -> Callable[[], object]:
        both = {"F": floats[:1], "T": encode_fixed_width(strings[:1], keep_zeros=True)} | inputs
        first = ModelMetadata(model.name, model.versions, tuple(t for t in model.inputs if t.name in inputs), ())
        return lambda: [build_request(first, {name: both[name] for name in inputs}, None) for _ in range(10)]

    plain, ready, each_time, theirs = seconds(
        request(F=floats),
        request(T=encoded),
        lambda: [encode_fixed_width(strings, keep_zeros=True) for _ in range(10)],
        lambda: serialize_byte_tensor(objects),
    )
    with capsys.disabled():
        print(
            f"\nf11, ratios to floats: encoded before {ready / plain:.1f}, encoded each time {each_time / plain:.0f}, "
            f"tritonclient {10 * theirs / plain:.0f}"
        )
    assert ready < 5 * plain
    assert each_time < 10 * theirs / 3
