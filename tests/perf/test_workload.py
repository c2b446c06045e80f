"""What is sent: shapes, batches, files and the bytes of both protocols."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clients.types import ModelMetadata, TensorMetadata
from perf.errors import UsageError
from perf.input_data import read_input_data
from perf.workload import GeneratorOptions, batch_samples, generate_samples, serialise

BATCHING = ModelMetadata(
    "m",
    ("1",),
    (TensorMetadata("IDS", "INT64", (-1, -1)), TensorMetadata("SCALE", "FP32", (-1, 2), optional=True)),
    (),
    max_batch_size=4,
)
TEXT = ModelMetadata("t", ("1",), (TensorMetadata("TEXT", "BYTES", (-1, 1)),), (), max_batch_size=4)
SINGLE = ModelMetadata("s", ("1",), (TensorMetadata("X", "FP32", (2, 2)),), ())


def test_dynamic_dimension_needs_a_shape() -> None:
    with pytest.raises(UsageError, match="--shape IDS:1 "):
        generate_samples(BATCHING, GeneratorOptions(), 1)


@pytest.mark.parametrize("shape", [(2, 2), (), (-1,)])
def test_shape_that_does_not_fit_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="does not fit"):
        generate_samples(BATCHING, GeneratorOptions(shapes={"IDS": shape}), 1)


def test_generated_samples_need_no_optional_input() -> None:
    samples = generate_samples(BATCHING, GeneratorOptions(shapes={"IDS": (5,)}, seed=1), 3)
    assert [list(sample) for sample in samples] == [["IDS"]] * 3
    assert {sample["IDS"].shape for sample in samples} == {(5,)}
    assert all(set(sample["IDS"].tolist()) <= {0, 1} for sample in samples)


def test_the_seed_decides_what_is_generated() -> None:
    def payload(seed: int) -> tuple[bytes, ...]:
        samples = generate_samples(SINGLE, GeneratorOptions(seed=seed), 4)
        return serialise(SINGLE, batch_samples(SINGLE, samples, 1), "grpc", "")

    assert payload(1) == payload(1)
    assert payload(1) != payload(2)
    assert len(set(payload(1))) == 4


def test_generated_strings() -> None:
    random = generate_samples(TEXT, GeneratorOptions(string_length=7), 2)
    assert [len(sample["TEXT"][0]) for sample in random] == [7, 7]
    fixed = generate_samples(TEXT, GeneratorOptions(string_data="é"), 1)
    assert fixed[0]["TEXT"].tolist() == [b"\xc3\xa9"]
    assert generate_samples(TEXT, GeneratorOptions("zero"), 1)[0]["TEXT"].tolist() == [b""]


def test_zero_inputs() -> None:
    assert generate_samples(SINGLE, GeneratorOptions("zero"), 1)[0]["X"].tolist() == [[0, 0], [0, 0]]


def test_samples_go_round_in_batches() -> None:
    samples = [{"IDS": np.array([index], np.int64)} for index in range(3)]
    requests = batch_samples(BATCHING, samples, 2)
    assert [request["IDS"].tolist() for request in requests] == [[[0], [1]], [[2], [0]]]


def test_batches_that_cannot_be_are_refused() -> None:
    samples = [{"IDS": np.zeros(size, np.int64)} for size in (1, 2)]
    with pytest.raises(UsageError, match="batch size is 5; model 'm' takes 1 to 4"):
        batch_samples(BATCHING, samples, 5)
    with pytest.raises(UsageError, match="only 1 is allowed"):
        batch_samples(SINGLE, [{"X": np.zeros((2, 2), np.float32)}], 2)
    with pytest.raises(UsageError, match="would share a batch"):
        batch_samples(BATCHING, samples, 2)


def test_c19_grpc_and_http_carry_what_tritonclient_would() -> None:
    import tritonclient.http
    from tritonclient.grpc import service_pb2

    value = np.array([[b"a"]], dtype=np.object_)
    (over_grpc,) = serialise(TEXT, [{"TEXT": value}], "grpc", "host:1", "3")
    request = service_pb2.ModelInferRequest.FromString(over_grpc)
    assert (request.model_name, request.model_version) == ("t", "3")
    assert (request.inputs[0].name, request.inputs[0].datatype, list(request.inputs[0].shape)) == (
        "TEXT",
        "BYTES",
        [1, 1],
    )
    assert list(request.raw_input_contents) == [b"\x01\x00\x00\x00a"]

    (over_http,) = serialise(TEXT, [{"TEXT": value}], "http", "host:1", "3")
    head, body = over_http.split(b"\r\n\r\n", 1)
    tensor = tritonclient.http.InferInput("TEXT", [1, 1], "BYTES").set_data_from_numpy(value)
    theirs, header_length = tritonclient.http.InferenceServerClient.generate_request_body([tensor])
    length = int(head.split(b"Inference-Header-Content-Length: ")[1].split(b"\r\n")[0])
    assert json.loads(body[:length]) == json.loads(bytes(theirs)[:header_length])
    assert body[length:] == bytes(theirs)[header_length:]
    assert head.startswith(b"POST /v2/models/t/versions/3/infer HTTP/1.1\r\nHost: host:1\r\n")
    assert f"Content-Length: {len(body)}".encode() in head.split(b"\r\n")


def write(folder: Path, document: Any) -> Path:
    path = folder / "inputs.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


def test_input_file_in_all_its_forms(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {
            "data": [
                {"IDS": [1, 2, 3]},
                [{"IDS": {"content": [4, 5], "shape": [2]}, "SCALE": [0.5, 1]}],
                {"IDS": {"b64": "AQAAAAAAAAACAAAAAAAAAA=="}},
            ]
        },
    )
    samples = read_input_data(path, BATCHING)
    assert [sample["IDS"].tolist() for sample in samples] == [[1, 2, 3], [4, 5], [1, 2]]
    assert samples[1]["SCALE"].dtype == np.float32


def test_input_file_takes_flat_lists_and_text(tmp_path: Path) -> None:
    (sample,) = read_input_data(write(tmp_path, {"data": [{"X": [1, 2, 3, 4]}]}), SINGLE)
    assert sample["X"].tolist() == [[1, 2], [3, 4]]
    (sample,) = read_input_data(write(tmp_path, {"data": [{"TEXT": ["é"]}]}), TEXT)
    assert sample["TEXT"].tolist() == [b"\xc3\xa9"]


@pytest.mark.parametrize(
    ("document", "part"),
    [
        ("{]", "not JSON"),
        ('{"data": [{"IDS": ', "is cut: it ends within its JSON, after 18 characters"),  # i11
        ({"data": []}, 'needs a list under "data"'),
        ([1], 'needs a list under "data"'),
        ({"data": [5]}, "entry 0"),
        ({"data": [{"IDS": [1]}, {"NOPE": [1]}]}, "entry 1: model 'm' has no input 'NOPE'"),
        ({"data": [{"SCALE": [1, 2]}]}, "IDS (INT64 [-1, -1]) is missing"),
        ({"data": [{"IDS": [1.5]}]}, "INT64"),
        ({"data": [{"IDS": {"content": [1, 2], "shape": [3]}}]}, "has 2 values"),
        ({"data": [{"IDS": {"content": [1, 2], "shape": [1, 2]}}]}, "does not fit"),
        ({"data": [{"IDS": {"b64": "A"}}]}, "b64"),
        ({"data": [{"IDS": {"b64": "AAAA"}}]}, "3 bytes"),
        ({"data": [{"IDS": {}}]}, '"content" or "b64"'),
        ({"data": [{"IDS": {"content": [1], "shape": "x"}}]}, "shape"),
    ],
)
def test_input_file_that_does_not_fit(tmp_path: Path, document: Any, part: str) -> None:
    with pytest.raises(UsageError) as raised:
        read_input_data(write(tmp_path, document), BATCHING)
    assert part in str(raised.value)


def test_input_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        read_input_data(tmp_path / "nope.json", BATCHING)
