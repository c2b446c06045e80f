"""Models that people really have: each is either compiled and proved, or refused by line with what to change."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from compiler.errors import ModelRefused, SpecError
from compiler.manifest import BuildResult
from compiler.pipeline import compile_model
from compiler.repository import Repository
from compiler.spec import model_spec_from_file
from compiler.triton_config import config_from_text
from tests.compiler.conftest import SPEC

pytestmark = pytest.mark.usefixtures("exporter_library")  # once for all exports of this module


def _build(path: Path) -> BuildResult:
    return compile_model(model_spec_from_file(path), Repository(path.parent / "repo"))


def _refused(path: Path, kind: type[Exception] = ModelRefused) -> str:
    """Builds, expects a refusal, and checks that nothing was published."""
    with pytest.raises(kind) as error:
        _build(path)
    assert not (path.parent / "repo").exists()
    return str(error.value)


def _config(result: BuildResult):
    return config_from_text((result.published.folder.parent / "config.pbtxt").read_text(), "config.pbtxt")


def _run(result: BuildResult, **inputs):
    session = onnxruntime.InferenceSession(str(result.published.folder / "model.onnx"))
    return dict(zip([o.name for o in session.get_outputs()], session.run(None, inputs), strict=True))


def test_a_plain_model_is_built_and_equal(project):
    path = project(
        """
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                torch.manual_seed(0)
                self.layer = nn.Linear(16, 3)
            def forward(self, x):
                return torch.tanh(self.layer(x))
        build = Model
        """
    )
    result = _build(path)
    x = np.random.default_rng(0).standard_normal((5, 16)).astype(np.float32)
    import torch

    torch.manual_seed(0)
    layer = torch.nn.Linear(16, 3)
    want = torch.tanh(layer(torch.from_numpy(x))).detach().numpy()
    assert np.allclose(_run(result, x=x)["y"], want, atol=1e-6)
    parity = result.published.manifest["parity"]
    assert parity["num_cases"] >= 6 and parity["max_abs"] < 1e-5
    # Nothing of this machine is in what ships: no path, no stack trace.
    data = (result.published.folder / "model.onnx").read_bytes()
    assert str(path.parent).encode() not in data and b"File " not in data
    assert str(path.parent) not in json.dumps(result.published.manifest)


def test_a01_fixed_size_in_view_is_refused_by_line_and_number(project):
    path = project(
        """
        class Model(nn.Module):
            def forward(self, x):
                return x.view(8, -1)
        build = Model
        """
    )
    message = _refused(path)
    assert "dim 'batch' is not dynamic" in message or "the spec's dim 'batch' is the fixed number 8" in message
    assert "8" in message and "view" in message and "return x.view(8, -1)" in message


def test_a01_size_taken_as_a_python_int_is_refused(project):
    path = project(
        """
        class Model(nn.Module):
            def forward(self, x):
                b = int(x.shape[0])
                return x.reshape(b * 4, -1)
        build = Model
        """,
        SPEC.replace("{name: y, dtype: float32}", "{name: y, shape: [batch, 16]}"),
    )
    message = _refused(path)
    assert "'batch'" in message or "batch" in message
    assert "reshape" in message


def test_a01_rows_made_of_the_batch_are_no_batch(project):
    """The graph is right at every size, but its first output axis is 4 * batch: Triton could not split it."""
    path = project(
        """
        class Model(nn.Module):
            def forward(self, x):
                return x.reshape(x.shape[0] * 4, 4)
        build = Model
        """
    )
    assert "first axis" in _refused(path)


def test_a03_a_guard_on_a_dim_is_refused_with_the_dim(project):
    path = project(
        """
        class Model(nn.Module):
            def forward(self, x):
                return x.reshape(-1, 2560)
        build = Model
        """,
        SPEC.replace("[batch, 16]", "[batch, 1024]"),
    )
    message = _refused(path)
    # The traced batch of 3 does not even run; a divisible one is refused by its guard, below.
    assert "batch=3" in message and "x.reshape(-1, 2560)" in message and "batch 1..8" in message


def test_a03_a_branch_on_a_size_is_refused_with_the_guard(project):
    path = project(
        """
        class Model(nn.Module):
            def forward(self, x):
                return x + 1 if x.shape[0] < 5 else x * 2
        build = Model
        """
    )
    message = _refused(path)
    assert "dim 'batch' is not dynamic" in message and "x.shape[0]" in message


def test_a_branch_on_a_value_is_refused_by_line(project):
    path = project(
        """
        class Model(nn.Module):
            def forward(self, x):
                if x.sum() > 0:
                    return x + 1
                return x
        build = Model
        """
    )
    message = _refused(path)
    assert "depends on the values" in message and "if x.sum() > 0" in message and "torch.where" in message


def test_a04_misspelt_input_is_an_error_that_lists_the_names(project):
    path = project(
        """
        class Model(nn.Module):
            def forward(self, input):
                return input * 2
        build = Model
        """,
        SPEC.replace("name: x", "name: imput"),
    )
    message = _refused(path, SpecError)
    assert "spec.yaml:6: forward() has no input 'imput' (did you mean 'input'?); its inputs: input" in message


def test_a_missing_required_input_is_an_error(project):
    path = project(
        """
        class Model(nn.Module):
            def forward(self, x, scale):
                return x * scale
        build = Model
        """
    )
    assert "forward() needs the input 'scale'" in _refused(path, SpecError)


def test_a08_an_unused_input_is_pruned_and_reported(project):
    path = project(
        """
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.lin = nn.Linear(16, 4)
            def forward(self, a, b=None):
                return self.lin(a)
        build = Model
        """,
        SPEC.replace(
            "  - {name: x, dtype: float32, shape: [batch, 16]}",
            "  - {name: a, dtype: float32, shape: [batch, 16]}\n  - {name: b, dtype: float32, shape: [batch, 16]}",
        ),
    )
    result = _build(path)
    assert [t.name for t in _config(result).input] == ["a"]
    notes = [n for p in result.published.manifest["passes"] for n in p["notes"]]
    assert notes == ["input 'b' was pruned: no output depends on it"]


def test_a09_dict_outputs_are_matched_by_key(project):
    path = project(
        """
        class Model(nn.Module):
            def forward(self, x):
                return {"b": x + 1, "a": x * 2}
        build = Model
        """,
        SPEC.replace("  - {name: y, dtype: float32}", "  - {name: a}\n  - {name: b}"),
    )
    result = _build(path)
    got = _run(result, x=np.full((1, 16), 3, dtype=np.float32))
    assert (got["a"] == 6).all() and (got["b"] == 4).all()
    assert [t.name for t in _config(result).output] == ["a", "b"]


def test_a09_an_output_that_is_not_there_lists_the_keys(project):
    path = project(
        """
        class Model(nn.Module):
            def forward(self, x):
                return {"logits": x + 1, "hidden": x * 2, "none": None}
        build = Model
        """,
        SPEC.replace("name: y, dtype: float32", "name: logit"),
    )
    message = _refused(path)
    assert "forward() returns no output 'logit' (did you mean 'logits'?); it returns: hidden, logits" in message


def test_tuple_outputs_are_matched_by_count(project):
    path = project(
        """
        class Model(nn.Module):
            def forward(self, x):
                return x, x + 1
        build = Model
        """
    )
    assert "forward() returns 2 output(s), the spec names 1: y" in _refused(path)


def test_a10_inputs_are_bound_by_name_not_by_order(project):
    path = project(
        """
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                torch.manual_seed(0)
                self.words, self.types = nn.Embedding(50, 4), nn.Embedding(2, 4)
            def forward(self, input_ids, token_type_ids, attention_mask):
                x = self.words(input_ids) + self.types(token_type_ids)
                return (x * attention_mask.unsqueeze(-1)).sum(1)
        build = Model
        """,
        """
        name: small
        source: {factory: FACTORY}
        dims:
          batch: {max: 4}
          length: {max: 8}
        inputs:
          - {name: input_ids, dtype: int64, shape: [batch, length], range: [0, 49]}
          - {name: attention_mask, dtype: int64, shape: [batch, length], values: padding_mask}
          - {name: token_type_ids, dtype: int64, shape: [batch, length], range: [0, 1]}
        outputs:
          - {name: y}
        """,
    )
    result = _build(path)
    ids = np.array([[1, 2, 3]])
    types, full = np.zeros_like(ids), np.ones_like(ids)
    whole = _run(result, input_ids=ids, attention_mask=full, token_type_ids=types)["y"]
    masked = _run(result, input_ids=ids, attention_mask=np.array([[1, 1, 0]]), token_type_ids=types)["y"]
    short = _run(result, input_ids=ids[:, :2], attention_mask=full[:, :2], token_type_ids=types[:, :2])["y"]
    assert not np.allclose(whole, masked)
    assert np.allclose(masked, short, atol=1e-6)


def test_c01_fixed_shapes_are_served_whole(project):
    path = project(
        """
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.conv = nn.Conv2d(3, 4, 3)
            def forward(self, x):
                return self.conv(x).flatten(1)
        build = Model
        """,
        """
        name: fixed
        source: {factory: FACTORY}
        inputs:
          - {name: x, dtype: float32, shape: [1, 3, 8, 8]}
        outputs:
          - {name: y, dtype: float32, shape: [1, 144]}
        """,
    )
    result = _build(path)
    config = _config(result)
    assert config.max_batch_size == 0
    assert list(config.input[0].dims) == [1, 3, 8, 8] and list(config.output[0].dims) == [1, 144]
    # c05: written even where it is zero, so that nobody takes it for forgotten.
    assert "max_batch_size: 0" in (result.published.folder.parent / "config.pbtxt").read_text()


def test_c02_dims_do_not_repeat_the_batch(project):
    path = project(
        """
        class Model(nn.Module):
            def forward(self, x):
                return x.mean(dim=(1, 2))
        build = Model
        """,
        SPEC.replace("[batch, 16]", "[batch, 12, 12, 3]"),
    )
    config = _config(_build(path))
    assert config.max_batch_size == 8
    assert list(config.input[0].dims) == [12, 12, 3] and list(config.output[0].dims) == [3]


def test_c02_an_output_without_the_batch_is_refused(project):
    path = project(
        """
        class Model(nn.Module):
            def forward(self, x):
                return x.mean(dim=0)
        build = Model
        """
    )
    message = _refused(path)
    assert "'y'" in message and "first axis" in message


def test_c15_cpu_target_writes_kind_cpu(project):
    path = project("class Model(nn.Module):\n    def forward(self, x):\n        return x + 1\nbuild = Model\n")
    config = _config(_build(path))
    assert [g.kind for g in config.instance_group] == [config.instance_group[0].KIND_CPU]
    assert not config.instance_group[0].gpus


def test_c20_dtypes_are_those_of_the_file(project):
    path = project(
        """
        class Model(nn.Module):
            def forward(self, x):
                return x.argmax(1), x.half(), x.sum(1) > 0
        build = Model
        """,
        SPEC.replace("  - {name: y, dtype: float32}", "  - {name: index}\n  - {name: half}\n  - {name: flag}"),
    )
    result = _build(path)
    graph = onnx.load(str(result.published.folder / "model.onnx")).graph
    assert [o.type.tensor_type.elem_type for o in graph.output] == [7, 10, 9]
    config = _config(result)
    names = config.DESCRIPTOR.fields_by_name["output"].message_type.fields_by_name["data_type"].enum_type
    assert [names.values_by_number[o.data_type].name for o in config.output] == ["TYPE_INT64", "TYPE_FP16", "TYPE_BOOL"]


def test_c20_a_dtype_that_the_file_does_not_have_is_refused(project):
    path = project(
        "class Model(nn.Module):\n    def forward(self, x):\n        return x.argmax(1)\nbuild = Model\n",
        SPEC.replace("dtype: float32}", "dtype: int32}").replace("x, dtype: int32", "x, dtype: float32"),
    )
    path.write_text(path.read_text().replace("{name: x, dtype: int32", "{name: x, dtype: float32"))
    assert "'y' is int64 in the compiled file, the spec says int32" in _refused(path)


def test_an_output_may_be_called_as_an_operator(project):
    """The exporter calls inner values after operators; two values of one name make a file that does not load."""
    path = project(
        """
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.second = nn.Linear(16, 4), nn.Linear(4, 4)
            def forward(self, x):
                return self.second(self.first(x))
        build = Model
        """,
        SPEC.replace("name: y", "name: linear"),
    )
    result = _build(path)
    assert list(_run(result, x=np.ones((2, 16), dtype=np.float32))) == ["linear"]
    assert result.published.manifest["graph"]["exported"]["ops"] == {"Gemm": 2}


def test_training_mode_is_left_before_anything_runs(project):
    path = project(
        """
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.drop, self.norm = nn.Dropout(0.9), nn.BatchNorm1d(16)
            def forward(self, x):
                return self.drop(self.norm(x))
        build = Model
        """
    )
    graph = onnx.load(str(_build(path).published.folder / "model.onnx")).graph
    assert "Dropout" not in {n.op_type for n in graph.node}


def test_a_model_that_answers_nan_is_refused(project):
    path = project("class Model(nn.Module):\n    def forward(self, x):\n        return x.log()\nbuild = Model\n")
    assert "the PyTorch model itself answers NaN or infinity" in _refused(path)


def test_a_lost_parity_is_refused_and_nothing_is_published(project, monkeypatch):
    """A seeded wrong weight in the file that was written, after the graph's passes were proved."""
    from compiler.targets import onnxruntime as target

    path = project(
        """
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(16, 3)
            def forward(self, x):
                return self.layer(x)
        build = Model
        """
    )
    write = target.write

    def damaged(model, folder, spec):
        facts = write(model, folder, spec)
        if folder.name == "version":
            proto = onnx.load(str(folder / "model.onnx"))
            weight = next(i for i in proto.graph.initializer if list(i.dims) in ([3, 16], [16, 3]))
            array = onnx.numpy_helper.to_array(weight).copy()
            array.flat[0] += 0.01
            weight.CopyFrom(onnx.numpy_helper.from_array(array, weight.name))
            onnx.save(proto, str(folder / "model.onnx"))
        return facts

    import dataclasses

    monkeypatch.setattr(target, "TARGET", dataclasses.replace(target.TARGET, write=damaged))
    assert "the compiled file does not answer as the model does" in _refused(path)


def test_a06_large_weights_go_into_one_file_beside_the_graph(tmp_path):
    import onnx_ir as ir

    from compiler.targets.onnxruntime import open_session, write_onnx

    table = np.random.default_rng(0).standard_normal((1024, 512)).astype(np.float32)  # 2 MiB
    proto = onnx.helper.make_model(
        onnx.helper.make_graph(
            [onnx.helper.make_node("Gather", ["table", "ids"], ["y"])],
            "g",
            [onnx.helper.make_tensor_value_info("ids", 7, ["batch"])],
            [onnx.helper.make_tensor_value_info("y", 1, ["batch", 512])],
            [onnx.numpy_helper.from_array(table, "table")],
        ),
        opset_imports=[onnx.helper.make_opsetid("", 20)],
    )
    for _ in range(2):  # a07: writing again leaves the same bytes, not twice as many
        write_onnx(ir.from_proto(proto), tmp_path, threshold_bytes=1 << 20)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["model.onnx", "model.onnx.data"]
        assert (tmp_path / "model.onnx.data").stat().st_size == table.nbytes
    ids = np.array([3, 1])
    assert np.array_equal(open_session(tmp_path, 1)({"ids": ids})["y"], table[ids])
