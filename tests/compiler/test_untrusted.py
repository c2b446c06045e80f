"""Files from others, damaged at random and on purpose: refused in words, in little memory, and nothing is written."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from safetensors.torch import save_file

from compiler.errors import ModelRefused
from compiler.sources.onnx_external import external_tensors
from compiler.sources.onnx_file import read_model
from compiler.sources.weights import read_safetensors
from tests.compiler.onnx_models import WEIGHT, external_model, make_external, model, tensor, write
from tests.serving import environment

# Opens many damaged files in a process of its own, which may have 3 GB: a crash, a hang or a foreign exception fails.
FUZZ = """
import pathlib, random, resource, sys, time
resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))
from compiler.errors import ModelkilnError
from compiler.sources import open_source, source_files
from compiler.spec import model_spec_from_file
folder, seed, count = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
spec = model_spec_from_file(folder / "spec.yaml")
whole = (folder / "model.onnx").read_bytes()
rng = random.Random(seed)
opened = refused = 0
before = sorted(p.name for p in folder.iterdir())
for number in range(count):
    data = bytearray(whole)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(len(data))
        kind = rng.random()
        if kind < 0.6:
            data[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        elif kind < 0.75:
            del data[at:]
            data = data or bytearray(b"x")
        elif kind < 0.9:
            data[at:at] = bytes(rng.randrange(256) for _ in range(rng.randrange(1, 12)))
        else:
            del data[at : at + rng.randrange(1, 12)]
            data = data or bytearray(b"x")
    (folder / "model.onnx").write_bytes(bytes(data))
    started = time.process_time()
    try:
        source_files(spec)
        open_source(spec)
        opened += 1
    except ModelkilnError:
        refused += 1
    assert time.process_time() - started < 20, "one file took too long"
assert sorted(p.name for p in folder.iterdir()) == before
print(opened, refused, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_i05_onnx_files_with_random_damage_are_opened_or_refused_in_words(tmp_path):
    spec = write(tmp_path, external_model())
    (tmp_path / "w.bin").write_bytes(WEIGHT.tobytes())
    done = subprocess.run(
        [sys.executable, "-c", FUZZ, str(spec.parent), "1", "250"], capture_output=True, text=True, env=environment()
    )
    assert done.returncode == 0, done.stderr[-2000:]
    opened, refused, _ = map(int, done.stdout.split())
    assert opened + refused == 250 and refused > 50  # the damage is felt


def test_safetensors_with_random_damage_are_read_or_refused_in_words(tmp_path):
    path = tmp_path / "w.safetensors"
    save_file({"a": torch.ones(3, 4), "b": torch.zeros(2)}, path)
    whole, rng, refused = path.read_bytes(), np.random.default_rng(0), 0
    for _ in range(400):
        data = bytearray(whole)
        for at in rng.integers(0, len(data), rng.integers(1, 4)):
            data[at] = rng.integers(0, 256)
        path.write_bytes(bytes(data[: rng.integers(1, len(data) + 1)] if rng.random() < 0.3 else data))
        try:
            read_safetensors(path, "w.safetensors")
        except ModelRefused as error:
            assert error.message.startswith("w.safetensors is not a valid safetensors file: ")
            refused += 1
    assert refused > 100


HEADERS = {
    "length of 2**63": (1 << 63).to_bytes(8, "little"),
    "length beyond the file": (1 << 40).to_bytes(8, "little") + b"{}",
    "no JSON": (2).to_bytes(8, "little") + b"[[",
    "offsets beyond the file": b'{"a":{"dtype":"F32","shape":[1000000000],"data_offsets":[0,4000000000]}}',
    "offsets in reverse": b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}',
    "a hole": b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
    "an overlap": b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},'
    b'"b":{"dtype":"U8","shape":[6],"data_offsets":[2,8]}}',
    "a shape that wraps": b'{"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,4]}}',
    "an unknown type": b'{"a":{"dtype":"F99","shape":[1],"data_offsets":[0,4]}}',
}


@pytest.mark.parametrize("content", HEADERS.values(), ids=HEADERS)
def test_safetensors_headers_that_lie(tmp_path, content):
    path = tmp_path / "w.safetensors"
    header = content if content[:1] != b"{" else len(content).to_bytes(8, "little") + content
    path.write_bytes(header + b"\0" * 8)
    with pytest.raises(ModelRefused, match="is not a valid safetensors file"):
        read_safetensors(path, "w")


def test_i05_a_small_file_cannot_fill_the_memory_by_naming_its_bytes_often(tmp_path):
    proto = model()
    for number in range(40):
        item = TensorProto(name=f"t{number}", data_type=TensorProto.FLOAT, dims=[1 << 20])
        make_external(item, location="w.bin", length=4 << 20)
        proto.graph.initializer.append(item)
    (tmp_path / "w.bin").write_bytes(bytes(4 << 20))
    with pytest.raises(ModelRefused) as error:
        external_tensors(proto, tmp_path)
    assert error.value.message == (
        "40 tensors claim 167772160 bytes of external data, and its files have 4194304: the same bytes stand for "
        "more than 4 tensors on average"
    )
    del proto.graph.initializer[6:]  # two inside, four that share: tied weights are taken
    assert len(external_tensors(proto, tmp_path)) == 4


def test_i05_a_sparse_tensor_that_no_memory_holds_is_refused(tmp_path):
    proto = model()
    sparse = proto.graph.sparse_initializer.add()
    sparse.values.CopyFrom(numpy_helper.from_array(np.ones(1, np.float32), "s"))
    sparse.indices.CopyFrom(numpy_helper.from_array(np.zeros(1, np.int64), "i"))
    sparse.dims[:] = [1 << 20, 1 << 20]
    write(tmp_path, proto)
    with pytest.raises(ModelRefused) as error:
        read_model(tmp_path / "model.onnx", "model.onnx")
    assert error.value.message == (
        "the sparse tensor 's' has the shape [1048576, 1048576]: 1099511627776 elements once it is dense; "
        "allowed: 536870912"
    )


def test_deeply_nested_subgraphs_end_in_a_refusal_not_in_a_crash(tmp_path):
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["r"])], "g", [], [tensor("r", ["N", 16])])
    data = graph.SerializeToString()
    for _ in range(500):
        data = _field(1, _field(4, b"Loop") + _field(5, _field(1, b"body") + _field(6, data)))  # node, attribute, g
    (tmp_path / "model.onnx").write_bytes(_field(7, data))
    with pytest.raises(ModelRefused, match="is not a valid ONNX file"):
        read_model(tmp_path / "model.onnx", "model.onnx")


def _field(number: int, data: bytes) -> bytes:
    """Returns a protobuf field that holds bytes."""
    length, encoded = len(data), b""
    while length >= 0x80:
        encoded, length = encoded + bytes([length & 0x7F | 0x80]), length >> 7
    return bytes([number << 3 | 2]) + encoded + bytes([length]) + data


@pytest.mark.parametrize("place", ["name", "op_type", "input"])
def test_names_that_are_no_text_are_refused(tmp_path, place):
    data = model(nodes=[helper.make_node("Relu", ["x"], ["y"], name="n")], initializers=[]).SerializeToString()
    old = {"name": _field(3, b"n"), "op_type": _field(4, b"Relu"), "input": _field(1, b"x")}[place]
    assert data.count(old) >= 1
    (tmp_path / "model.onnx").write_bytes(data.replace(old, old[:-1] + b"\xff", 1))
    with pytest.raises(ModelRefused, match=f"onnx.NodeProto.{place} is no UTF-8 text"):
        read_model(tmp_path / "model.onnx", "model.onnx")
