"""Whether a request fits a model: what is accepted, and what the error says."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from clients import InputError, ModelMetadata, TensorMetadata, check_inputs
from clients.types import metadata_from_json

MODEL = ModelMetadata(
    name="encoder",
    versions=("1",),
    inputs=(
        TensorMetadata("input_ids", "INT64", (-1, -1)),
        TensorMetadata("scale", "FP32", (-1, 2), optional=True),
    ),
    outputs=(TensorMetadata("embedding", "FP32", (-1, 384)),),
    max_batch_size=4,
)
TEXT = ModelMetadata("text", ("1",), (TensorMetadata("TEXT", "BYTES", (1, -1)),), ())


def one_input(datatype: str, shape: tuple[int, ...] = (-1,)) -> ModelMetadata:
    return ModelMetadata("m", ("1",), (TensorMetadata("X", datatype, shape),), ())


def test_lists_take_the_dtype_of_the_model() -> None:
    arrays = check_inputs(MODEL, {"input_ids": [[1, 2, 3]], "scale": [[1, 2]]})
    assert arrays["input_ids"].dtype == np.int64 and arrays["input_ids"].tolist() == [[1, 2, 3]]
    assert arrays["scale"].dtype == np.float32 and arrays["scale"].tolist() == [[1.0, 2.0]]


def test_optional_input_may_be_left_out() -> None:
    assert list(check_inputs(MODEL, {"input_ids": np.zeros((1, 3), np.int64)})) == ["input_ids"]


@pytest.mark.parametrize(
    ("inputs", "parts"),
    [
        ({"ids": [[1]]}, ["no input 'ids'", "input_ids (INT64 [-1, -1])", "scale (FP32 [-1, 2], optional)"]),
        ({"scale": [[1.0, 2.0]]}, ["needs input input_ids", "given: 'scale'"]),
        ({}, ["needs input input_ids", "given: none"]),
        (
            {"input_ids": np.ones((1, 2), np.float32)},
            ["numpy int64 (INT64)", "not float32", ".astype(np.int64)"],
        ),
        ({"input_ids": np.ones((1, 2), np.int32)}, ["numpy int64", "not int32"]),
        ({"input_ids": [[1.5]]}, ["INT64", "float64"]),
        ({"input_ids": [1, 2]}, ["rank 1 (shape [2])", "rank 2: [-1, -1]", "first dimension is the batch"]),
        ({"input_ids": [[1, 2], [3]]}, ["not rectangular"]),
        ({"input_ids": [[1]], "scale": [[1.0, 2.0, 3.0]]}, ["3 in dimension 1", "wants 2"]),
        (
            {"input_ids": [[1]], "scale": [[1.0, 2.0]] * 2},
            ["differ in batch size", "'input_ids': 1", "'scale': 2"],
        ),
        ({"input_ids": [[1]] * 5}, ["batch size 5", "1 to 4"]),
        ({"input_ids": np.zeros((0, 2), np.int64)}, ["batch size 0", "1 to 4"]),
    ],
)
def test_error_says_what_was_seen_and_what_is_allowed(inputs: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(InputError) as raised:
        check_inputs(MODEL, inputs)
    for part in parts:
        assert part in str(raised.value)


@pytest.mark.parametrize(
    ("datatype", "value", "allowed"),
    [
        ("INT8", [128], "-128 to 127"),
        ("UINT8", [-1], "0 to 255"),
        ("INT32", [2**31], "-2147483648 to 2147483647"),
    ],
)
def test_integers_that_would_wrap_are_refused(datatype: str, value: list[int], allowed: str) -> None:
    with pytest.raises(InputError, match=allowed):
        check_inputs(one_input(datatype), {"X": value})


def test_integers_that_fit_are_taken() -> None:
    assert check_inputs(one_input("UINT8"), {"X": [0, 255]})["X"].tolist() == [0, 255]
    assert check_inputs(one_input("FP16"), {"X": [1]})["X"].dtype == np.float16
    assert check_inputs(one_input("FP32", ()), {"X": 2.5})["X"].shape == ()


def test_unknown_datatype_is_named() -> None:
    with pytest.raises(InputError, match="FP4"):
        check_inputs(one_input("FP4"), {"X": [1]})


def test_c18_bytes_keep_trailing_zeros() -> None:
    for value in ([[b"ab\x00"]], np.array([[b"ab\x00"]], dtype=np.object_), [[bytearray(b"ab\x00")]]):
        assert check_inputs(TEXT, {"TEXT": value})["TEXT"].tolist() == [[b"ab\x00"]]


def test_c18_numpy_s_array_is_refused_with_the_reason() -> None:
    with pytest.raises(InputError, match=r"already lost trailing zero bytes.*dtype=object"):
        check_inputs(TEXT, {"TEXT": np.array([[b"ab\x00"]])})


def test_c19_strings_become_utf8_objects() -> None:
    for value in ([["a", "", "é"]], np.array([["a", "", "é"]]), (("a", b"", "é"),)):
        array = check_inputs(TEXT, {"TEXT": value})["TEXT"]
        assert array.dtype == np.object_ and array.shape == (1, 3)
        assert array.tolist() == [[b"a", b"", b"\xc3\xa9"]]


@pytest.mark.parametrize("value", [[["a", 1]], [[None]], np.ones((1, 2)), np.array([[1, "a"]], dtype=np.object_)])
def test_bytes_refuse_what_is_no_text(value: Any) -> None:
    with pytest.raises(InputError, match="wants str or bytes"):
        check_inputs(TEXT, {"TEXT": value})


def test_bytes_ragged_lists_are_refused() -> None:
    with pytest.raises(InputError, match="not rectangular"):
        check_inputs(TEXT, {"TEXT": [["a", "b"], ["c"]]})


def test_metadata_from_both_protocols_is_the_same() -> None:
    config = {"max_batch_size": 8, "input": [{"name": "A"}, {"name": "B", "optional": True}]}

    def answer(shape: list[Any]) -> dict[str, Any]:
        tensors = [{"name": name, "datatype": "FP32", "shape": shape} for name in "AB"]
        return {"name": "m", "versions": ["1", "2"], "inputs": tensors, "outputs": tensors[:1]}

    over_grpc = metadata_from_json(answer(["-1", "4"]), config)
    assert over_grpc == metadata_from_json(answer([-1, 4]), config)
    assert over_grpc == ModelMetadata(
        name="m",
        versions=("1", "2"),
        inputs=(TensorMetadata("A", "FP32", (-1, 4)), TensorMetadata("B", "FP32", (-1, 4), optional=True)),
        outputs=(TensorMetadata("A", "FP32", (-1, 4)),),
        max_batch_size=8,
    )


def test_a_finite_number_does_not_become_infinite() -> None:
    for datatype, value in (("FP16", 65520.0), ("FP32", 1e300), ("FP16", 70_000.0)):
        with pytest.raises(InputError, match=rf"holds {re.escape(str(value))}; {datatype} allows finite values up to"):
            check_inputs(one_input(datatype), {"X": [1.0, value]})
    kept = check_inputs(one_input("FP16"), {"X": [65504.0, float("inf"), float("-inf")]})["X"]
    assert kept.tolist() == [65504.0, float("inf"), float("-inf")]


def test_integers_of_all_64_bits_go_together() -> None:
    """numpy makes floats of 2**63 beside 1, and objects of 2**64."""
    values = [2**63 + 5, 1, 2**64 - 1]
    assert check_inputs(one_input("UINT64"), {"X": values})["X"].tolist() == values
    for datatype, wrong in (("UINT64", 2**64), ("INT64", 2**63), ("INT64", -(2**70))):
        with pytest.raises(InputError, match=rf"holds values from .*{wrong}.*{datatype} allows"):
            check_inputs(one_input(datatype), {"X": [1, wrong]})
    with pytest.raises(InputError, match="not object"):
        check_inputs(one_input("INT64"), {"X": [1, None]})


def test_the_advice_of_an_error_works() -> None:
    with pytest.raises(InputError) as raised:
        check_inputs(one_input("BOOL"), {"X": np.array([1, 0], np.uint8)})
    advice = str(raised.value).rpartition("np.")[2].removesuffix(")")
    assert getattr(np, advice) is np.bool_


def test_what_numpy_cannot_read_is_an_input_error() -> None:
    class NeedsGradient:
        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            raise RuntimeError("use tensor.detach().numpy() instead")

    with pytest.raises(InputError, match=r"'X' is no array, NeedsGradient: use tensor.detach"):
        check_inputs(one_input("FP32"), {"X": NeedsGradient()})  # type: ignore[dict-item]
