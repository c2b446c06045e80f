"""External data of hostile ONNX files: each is refused by the tensor's name, and nothing outside is opened."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from compiler.errors import ModelRefused
from compiler.pipeline import compile_model
from compiler.repository import Repository
from compiler.spec import model_spec_from_file
from tests.compiler.onnx_models import WEIGHT, external_model, make_external, model, tensor, write
from tests.compiler.opens import opens_of


def _refused(spec: Path) -> str:
    """Builds, expects a refusal, and checks that nothing was published."""
    with pytest.raises(ModelRefused) as error:
        compile_model(model_spec_from_file(spec), Repository(spec.parent / "repo"))
    assert not (spec.parent / "repo").exists()
    return str(error.value)


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A file beside the model's folder that has exactly the bytes that the model wants."""
    path = tmp_path / "secret.bin"
    path.write_bytes(WEIGHT.tobytes())
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "m").mkdir()
    return tmp_path / "m"


def test_the_watch_sees_an_open_by_python_and_one_by_onnxruntime(folder):
    """The proof of the proof: these files are opened, and the watch says so."""
    import onnxruntime

    write(folder, external_model())
    (folder / "w.bin").write_bytes(WEIGHT.tobytes())
    with opens_of(folder / "w.bin") as events:
        (folder / "w.bin").read_bytes()
    assert "opened" in events
    with opens_of(folder / "w.bin") as events:
        onnxruntime.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
    assert "opened" in events


LOCATIONS = [
    ("../secret.bin", "holds '..'"),
    ("sub/../../secret.bin", "holds '..'"),
    ("{outside}", "is absolute"),
    ("w.bin\\..\\secret.bin", "holds a backslash"),
    ("w.bin\0", "holds a NUL character"),
    ("", "has 0 characters"),
    ("n" * 300, "has 300 characters"),
    ("*/_ORT_MEM_ADDR_/*", "is one of ONNX Runtime's names for memory"),
]


@pytest.mark.parametrize(("location", "wrong"), LOCATIONS, ids=[wrong for _, wrong in LOCATIONS])
def test_i04_a_location_outside_the_folder_is_refused_unopened(folder, outside, location, wrong):
    location = location.format(outside=outside)
    spec = write(folder, external_model(location=location))
    with opens_of(outside) as events:
        message = _refused(spec)
    assert message == (
        f"tensor 'w': the location of its external data {wrong}: {location[:80]!r}\n"
        "  hint: allowed: a file in the model's own folder, by its plain name or a path below the folder"
    )
    assert events == []


def test_i04_links_to_the_outside_are_refused_unopened(folder, outside):
    (folder / "soft.bin").symlink_to(outside)
    (folder / "sub").symlink_to(outside.parent)
    os.link(outside, folder / "hard.bin")
    expected = {
        "soft.bin": "soft.bin is a symbolic link",
        "sub/secret.bin": "sub/secret.bin goes through a symbolic link",
        "hard.bin": "hard.bin is a hard link: its bytes may belong to a file outside the folder",
    }
    for location, wrong in expected.items():
        spec = write(folder, external_model(location=location))
        with opens_of(outside) as events:
            message = _refused(spec)
        assert message == f"tensor 'w': its external data {wrong}\n  hint: put a copy of the file into {folder}"
        assert events == []


def test_i04_a_pipe_is_refused_and_would_hang_if_it_were_opened(folder):
    os.mkfifo(folder / "w.bin")
    spec = write(folder, external_model())
    signal.alarm(60)
    try:
        assert "tensor 'w': its external data w.bin is not a regular file" in _refused(spec)
    finally:
        signal.alarm(0)


ENTRIES = [
    ({"length": 10**15}, "offset 0 + length 1000000000000000 is beyond the end of w.bin, which has 192 bytes"),
    ({"offset": 10**15}, "offset 1000000000000000 + length 192 is beyond the end of w.bin, which has 192 bytes"),
    ({"offset": 4}, "offset 4 + length 192 is beyond the end of w.bin, which has 192 bytes"),
    ({"length": 188}, "length is 188, but its shape [16, 3] and type need 192 bytes"),
    ({"length": -1}, "length is '-1'; allowed: a whole number of bytes, 0 or more"),
    ({"offset": "0x10"}, "offset is '0x10'; allowed: a whole number of bytes, 0 or more"),
    ({"offset": "1_0"}, "offset is '1_0'; allowed: a whole number of bytes, 0 or more"),
    ({"offset": "٣"}, "offset is '٣'; allowed: a whole number of bytes, 0 or more"),
    ({"offset": "9" * 30}, f"offset is '{'9' * 30}'; allowed: a whole number of bytes, 0 or more"),
    (
        {"__class__": "x"},
        "unknown key '__class__' in its external data; allowed: checksum, length, location, offset",
    ),
    (
        {"ofset": "0"},
        "unknown key 'ofset' in its external data (did you mean 'offset'?); "
        "allowed: checksum, length, location, offset",
    ),
    ({"basepath": "/"}, "unknown key 'basepath' in its external data; allowed: checksum, length, location, offset"),
]


@pytest.mark.parametrize(("entries", "wrong"), ENTRIES, ids=[str(e) for e, _ in ENTRIES])
def test_i05_impossible_numbers_and_unknown_keys_are_refused_before_a_byte_is_read(folder, entries, wrong):
    spec = write(folder, external_model(**entries))
    (folder / "w.bin").write_bytes(WEIGHT.tobytes())
    with opens_of(folder / "w.bin") as events:
        assert _refused(spec).splitlines()[0] == f"tensor 'w': {wrong}"
    assert events == []


def test_i05_a_key_twice_and_no_location(folder):
    (folder / "w.bin").write_bytes(WEIGHT.tobytes())
    twice = external_model()
    twice.graph.initializer[0].external_data.add(key="offset", value="8")
    assert _refused(write(folder, twice)) == "tensor 'w': the key 'offset' stands twice in its external data"
    none = external_model()
    del none.graph.initializer[0].external_data[:]
    assert _refused(write(folder, none)) == "tensor 'w': its external data lacks the key 'location'"


def test_i05_a_missing_file_says_where_it_was_looked_for(folder):
    assert _refused(write(folder, external_model())) == (
        f"tensor 'w': no such file of external data: w.bin\n  hint: looked for {folder}/w.bin"
    )


def test_i05_a_shape_larger_than_its_bytes_is_refused_before_it_is_allocated(folder):
    proto = model()
    proto.graph.initializer[0].dims[:] = [10**6, 10**6]
    assert _refused(write(folder, proto)) == (
        "tensor 'w': it holds 192 bytes, but its shape [1000000, 1000000] and type need 4000000000000"
    )


def _hidden(kind: str) -> onnx.ModelProto:
    """Returns a model whose only bad tensor is where a plain loop over the initializers does not look."""
    bad = numpy_helper.from_array(np.ones(3, np.float32), "bad")
    make_external(bad, location="../secret.bin")
    if kind == "constant":
        return model(
            [helper.make_node("Constant", [], ["c"], name="k", value=bad), helper.make_node("Add", ["x", "c"], ["y"])],
            [tensor("x", ["N", 3])],
            initializers=[],
        )
    if kind == "sparse":
        proto = model()
        sparse = proto.graph.sparse_initializer.add()
        sparse.values.CopyFrom(bad)
        sparse.indices.CopyFrom(numpy_helper.from_array(np.arange(3)))
        sparse.dims[:] = [3]
        return proto
    constant = helper.make_node("Constant", [], ["c"], name="k", value=bad)
    if kind == "function":
        body = [constant, helper.make_node("Add", ["a", "c"], ["r"])]
        function = helper.make_function("own", "F", ["a"], ["r"], body, [helper.make_opsetid("", 20)])
        proto = model(
            [helper.make_node("F", ["x"], ["y"], domain="own")], [tensor("x", ["N", 3])], initializers=[],
            functions=[function],
        )  # fmt: skip
        proto.opset_import.add(domain="own", version=1)
        return proto
    branch = helper.make_graph([helper.make_node("Identity", ["bad"], ["r"])], "b", [], [tensor("r", [3])], [bad])
    node = helper.make_node("If", ["flag"], ["y"], then_branch=branch, else_branch=branch)
    flag = numpy_helper.from_array(np.array(True), "flag")
    return model([node], initializers=[flag])


@pytest.mark.parametrize("kind", ["constant", "sparse", "function", "subgraph"])
def test_i04_tensors_of_attributes_subgraphs_and_functions_are_checked_too(folder, outside, kind):
    spec = write(folder, _hidden(kind))
    with opens_of(outside) as events:
        message = _refused(spec)
    assert message.startswith("tensor 'bad'") and "external data holds '..': '../secret.bin'" in message
    assert events == []


def test_a_tensor_without_a_name_is_named_by_its_node(folder):
    proto = _hidden("constant")
    proto.graph.node[0].attribute[0].t.name = ""
    assert _refused(write(folder, proto)).startswith("the tensor in attribute 'value' of node 'k': the location")


def test_a_file_that_was_exchanged_after_the_check_is_not_followed(folder, outside):
    """Between the check and the read a link takes the file's place."""
    from compiler.sources.onnx_external import external_tensors, load_external

    proto = external_model()
    (folder / "w.bin").write_bytes(WEIGHT.tobytes())
    checked = external_tensors(proto, folder)
    (folder / "w.bin").unlink()
    (folder / "w.bin").symlink_to(outside)
    with opens_of(outside) as events, pytest.raises(ModelRefused, match=r"tensor 'w': w\.bin changed"):
        load_external(checked)
    assert events == []


def test_four_bit_and_string_tensors(folder):
    from compiler.sources.onnx_external import external_tensors

    (folder / "w.bin").write_bytes(bytes(8))
    odd = TensorProto(name="q", data_type=TensorProto.INT4, dims=[3, 5])
    make_external(odd, location="w.bin", length=8)
    proto = model()
    proto.graph.initializer.append(odd)
    assert [t.num_bytes for t in external_tensors(proto, folder)] == [8]  # 15 nibbles
    odd.data_type = TensorProto.STRING
    proto.graph.initializer[-1].CopyFrom(odd)
    with pytest.raises(ModelRefused, match="tensor 'q': its element type 8 cannot be external data"):
        external_tensors(proto, folder)
