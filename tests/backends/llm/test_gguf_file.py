"""The header of a GGUF file: what is right is read, what is wrong is refused by name, quickly and in little memory."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.llm.loaders.gguf_file import open_gguf
from compiler.errors import ModelRefused
from tests.backends.llm.gguf_files import GgufBytes, Tensor, string, tensor, tiny


def _refusal(path: Path, file: GgufBytes | bytes, most_mb: float = 50) -> str:
    """Returns the message with which a file is refused, after checking what memory that took."""
    data = file if isinstance(file, bytes) else file.to_bytes()
    path.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(ModelRefused) as caught:
            open_gguf(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < most_mb * 1e6, f"{peak / 1e6:.0f} MB"
    assert str(caught.value).startswith(path.name)
    return str(caught.value)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.gguf"


def test_values_of_all_types_are_read(path: Path) -> None:
    scalars = {
        "u8": struct.pack("<IB", 0, 200),
        "i8": struct.pack("<Ib", 1, -7),
        "u16": struct.pack("<IH", 2, 60000),
        "i16": struct.pack("<Ih", 3, -300),
        "u32": struct.pack("<II", 4, 1 << 31),
        "i32": struct.pack("<Ii", 5, -5),
        "f32": struct.pack("<If", 6, 0.5),
        "yes": struct.pack("<IB", 7, 1),
        "text": "größer",
        "u64": struct.pack("<IQ", 10, 1 << 60),
        "i64": struct.pack("<Iq", 11, -(1 << 60)),
        "f64": struct.pack("<Id", 12, 0.1),
        "words": ["a", "", "ä"],
        "floats": [0.5, -2.0],
    }
    values = open_gguf(GgufBytes(scalars, []).write(path)).metadata.values
    assert {k: v for k, v in values.items() if k not in ("words", "floats")} == {
        **{"u8": 200, "i8": -7, "u16": 60000, "i16": -300, "u32": 1 << 31, "i32": -5, "f32": 0.5, "yes": True},
        **{"text": "größer", "u64": 1 << 60, "i64": -(1 << 60), "f64": 0.1},
    }
    assert values["words"] == ["a", "", "ä"]
    assert isinstance(values["floats"], np.ndarray) and values["floats"].tolist() == [0.5, -2.0]


def test_j01_the_first_dim_counts_columns(path: Path) -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    file = open_gguf(GgufBytes({}, [Tensor("t", (4, 3), array.tobytes())]).write(path))
    assert file.tensors["t"].shape == (3, 4)
    assert np.array_equal(file.read("t").view("<f4").reshape(3, 4), array)


@pytest.mark.parametrize(
    ("num_dims", "dims"), [(3, (1 << 22, 1 << 22, 1 << 20)), (2, (1 << 63, 2)), (4, (1 << 16,) * 4)]
)
def test_j05_a_product_of_dims_that_would_wrap_is_refused(path: Path, num_dims: int, dims: tuple[int, ...]) -> None:
    file = GgufBytes({}, [Tensor("blk.0.attn_q.weight", dims, b"\0" * 64)])
    elements = int(np.prod([float(d) for d in dims]))
    message = _refusal(path, file)
    assert "tensor 'blk.0.attn_q.weight'" in message and f"{elements * 4}"[:6] in message


@pytest.mark.parametrize(
    ("file", "words"),
    [
        (GgufBytes({}, [], more_pairs=[("k", struct.pack("<IQ", 8, 1 << 40))]), "'k' needs 1099511627776 bytes"),
        (GgufBytes({}, [Tensor("t", (1,) * 9, b"\0" * 4)]), "tensor 't' has 9 dims; allowed: 1 to 4"),
        (GgufBytes({}, [Tensor("t", (), b"\0" * 4)]), "tensor 't' has 0 dims"),
        (GgufBytes({"general.alignment": 0}, []), "general.alignment is 0"),
        (GgufBytes({"general.alignment": 1 << 30}, []), "general.alignment is 1073741824"),
        (GgufBytes({"general.alignment": 48}, []), "general.alignment is 48"),
        (GgufBytes({"general.alignment": "32"}, []), "'general.alignment' is '32'; wanted: an integer"),
        (GgufBytes({"k": struct.pack("<IIQIQ", 9, 9, 1, 9, 1)}, []), "'k' is an array of arrays"),
        (GgufBytes({"k": struct.pack("<IIQ", 9, 8, 1 << 60)}, []), "'k' has 1152921504606846976 elements"),
        (GgufBytes({"k": struct.pack("<IIQ", 9, 8, 1 << 20)}, []), "'k' needs 8388608 bytes"),
        (GgufBytes({"k": struct.pack("<IIQ", 9, 12, 1 << 20)}, []), "'k' needs 8388608 bytes"),
        (GgufBytes({"k": struct.pack("<IIQ", 9, 12, 1 << 61)}, []), "elements; allowed: 4194304"),
        (GgufBytes({"k": struct.pack("<I", 13)}, []), "'k' has the value type 13"),
        (GgufBytes({"k": struct.pack("<IB", 7, 2)}, []), "'k' is the bool 2"),
        (GgufBytes({"k": struct.pack("<I", 8) + string(b"\xff\xfe")}, []), "'k' is not UTF-8: b'\\xff\\xfe'"),
        (GgufBytes({}, [], num_tensors=1 << 40), "claims 1099511627776 tensors; allowed: 65536"),
        (GgufBytes({}, [], num_pairs=1 << 40), "claims 1099511627776 metadata pairs"),
        (GgufBytes({}, [], num_tensors=3), "the number of dims of tensor '' needs 4 bytes"),
    ],
)
def test_j06_lengths_dims_alignments_and_nested_arrays_are_refused(path: Path, file: GgufBytes, words: str) -> None:
    assert words in _refusal(path, file)


def test_j06_many_arrays_share_one_limit(path: Path) -> None:
    """Each array is allowed; together they would be held as many times their size in the file."""
    array = struct.pack("<IIQ", 9, 0, 1 << 20) + bytes(1 << 20)
    file = GgufBytes({}, [], more_pairs=[(f"k{i}", array) for i in range(5)])
    assert "'k4' has 1048576 elements; allowed: 4194304 in all" in _refusal(path, file)


def test_a_long_header_is_refused_before_it_is_read(path: Path) -> None:
    """The file is sparse and really as long as it claims."""
    path.write_bytes(GgufBytes({}, [], more_pairs=[("k", struct.pack("<IQ", 8, 1 << 33))]).to_bytes())
    with path.open("r+b") as file:
        file.truncate(1 << 34)
    tracemalloc.start()
    with pytest.raises(ModelRefused, match=r"'k' needs 8589934592 bytes .* a header of at most 67108864"):
        open_gguf(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10e6


@pytest.mark.parametrize(
    ("file", "words"),
    [
        (GgufBytes({}, [], magic=b"GGML"), "starts with b'GGML'"),
        (GgufBytes({}, [], version=1), "has GGUF version 1; allowed: 2 and 3"),
        (GgufBytes({}, [], version=4), "has GGUF version 4"),
        (GgufBytes({}, [], version=3 << 24), "it is big-endian"),
        (GgufBytes({}, [], more_pairs=[("k", 1), ("k", 2)]), "has the metadata key 'k' twice"),
        (GgufBytes({}, [tensor("t", np.ones(8)), tensor("t", np.ones(8))]), "two tensors are called 't'"),
        (GgufBytes({}, [Tensor("t", (4,), b"\0" * 16, type_id=4)]), "tensor 't' has type 4; allowed: BF16, F16, F32"),
        (GgufBytes({}, [Tensor("t", (0, 4), b"")]), "tensor 't' has dims [0, 4]"),
        (GgufBytes({}, [Tensor("t", (48, 2), b"\0" * 54, type_id=2)]), "allowed for Q4_0: none is 0, the first is a"),
        (GgufBytes({}, [Tensor("t", (4,), b"\0" * 16, offset=4)]), "starts at 4, which is not a multiple"),
    ],
)
def test_what_is_no_gguf_is_refused(path: Path, file: GgufBytes, words: str) -> None:
    assert words in _refusal(path, file)


def test_tensors_that_share_bytes_are_refused(path: Path) -> None:
    file = GgufBytes({}, [tensor("a", np.ones(16)), tensor("b", np.ones(16)), tensor("c", np.ones(8))])
    open_gguf(file.write(path))
    start = len(file.to_bytes()) - 160
    assert f"tensors 'a' and 'c' share bytes from {start + 32} on" in _refusal(path, file.with_tensor("c", offset=32))
    assert "tensors 'b' and 'c' share" in _refusal(path, file.with_tensor("c", offset=64))


def test_a_tensor_past_the_end_is_refused(path: Path) -> None:
    file = tiny().with_tensor("blk.1.ffn_up.weight", offset=1 << 62)
    assert "tensor 'blk.1.ffn_up.weight' [96, 64] F32 ends at byte 46116860184" in _refusal(path, file)


def test_a_file_cut_at_any_byte_is_refused(path: Path) -> None:
    file = GgufBytes({"text": "abc", "list": ["a", "bc"], "n": 3}, [tensor("a", np.ones(8)), tensor("b", np.ones(8))])
    whole = file.to_bytes()
    assert set(open_gguf(file.write(path)).tensors) == {"a", "b"}
    for length in range(len(whole)):
        _refusal(path, whole[:length], most_mb=5)


def test_a_file_that_shrinks_after_it_was_opened_is_refused(path: Path) -> None:
    file = open_gguf(GgufBytes({}, [tensor("a", np.ones(64))]).write(path))
    with path.open("r+b") as opened:
        opened.truncate(100)
    with pytest.raises(ModelRefused, match="tensor 'a' is cut off: the file changed while it was read"):
        file.read("a")


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match="No such file"):
        open_gguf(tmp_path / "none.gguf")
    with pytest.raises(ModelRefused, match="Is a directory"):
        open_gguf(tmp_path)


def test_the_package_gguf_reads_the_same(smollm2: Path) -> None:
    gguf = pytest.importorskip("gguf")
    ours, theirs = open_gguf(smollm2), gguf.GGUFReader(str(smollm2))
    assert len(ours.tensors) == len(theirs.tensors) == 272
    for other in theirs.tensors:
        info = ours.tensors[other.name]
        assert info.shape == tuple(int(d) for d in reversed(other.shape))
        assert (info.type.name, info.offset, info.nbytes) == (other.tensor_type.name, other.data_offset, other.n_bytes)
    for key, item in ours.metadata.values.items():
        expected: Any = theirs.fields[key].contents()
        assert (item.tolist() if isinstance(item, np.ndarray) else item) == expected, key
