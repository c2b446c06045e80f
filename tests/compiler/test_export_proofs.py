"""What an export must not lose: large integers, computed pads, the names of outputs, and the same bytes each time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from compiler.manifest import BuildResult
from compiler.pipeline import compile_model
from compiler.repository import Repository
from compiler.spec import model_spec_from_file
from tests.compiler.conftest import SPEC
from tests.serving import run_compile

pytestmark = pytest.mark.usefixtures("exporter_library")  # once for all exports of this module


def _build(path: Path) -> BuildResult:
    return compile_model(model_spec_from_file(path), Repository(path.parent / "repo"))


def _run(result: BuildResult, **inputs: np.ndarray) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(str(result.published.folder / "model.onnx"))
    return session.run(None, inputs)


def _graph(result: BuildResult) -> onnx.GraphProto:
    return onnx.load(str(result.published.folder / "model.onnx")).graph


def test_a15_int64_constants_beyond_int32_are_kept_and_exact(project):
    """An end of 2**63 - 1 in a slice is harmless; 2**40 is a number that clamping would change."""
    path = project(
        """
        class Model(nn.Module):
            def forward(self, x):
                return x[:, 1:] + 2**40
        build = Model
        """,
        SPEC.replace("float32, shape: [batch, 16]", "int64, shape: [batch, 16], range: [-1000, 1000]").replace(
            "{name: y, dtype: float32}", "{name: y, dtype: int64}"
        ),
    )
    result = _build(path)
    x = np.arange(32, dtype=np.int64).reshape(2, 16) - 7
    assert np.array_equal(_run(result, x=x)[0], x[:, 1:] + 2**40)
    values = [v for i in _graph(result).initializer for v in onnx.numpy_helper.to_array(i).flatten().tolist()]
    assert 2**40 in values and 2**31 - 1 not in values


def test_a16_a_pad_with_computed_pads_becomes_one_with_constants(project):
    path = project(
        """
        class Model(nn.Module):
            def forward(self, x):
                left = torch.tensor(1) + torch.tensor(1)
                return nn.functional.pad(x, (2, x.shape[1] - 13)) * left
        build = Model
        """
    )
    result = _build(path)
    graph = _graph(result)
    (pad,) = [n for n in graph.node if n.op_type == "Pad"]
    constants = {i.name: onnx.numpy_helper.to_array(i).tolist() for i in graph.initializer}
    assert constants[pad.input[1]] == [0, 2, 0, 3]
    x = np.ones((3, 16), np.float32)
    assert np.array_equal(_run(result, x=x)[0], np.pad(x, ((0, 0), (2, 3))) * 2)


def test_a16_pads_that_the_file_concatenates_from_constants_are_folded(tmp_path):
    from onnx import helper, numpy_helper

    from tests.compiler.onnx_models import SPEC as ONNX_SPEC
    from tests.compiler.onnx_models import model, tensor, write

    nodes = [
        helper.make_node("Concat", ["begin", "end"], ["pads"], axis=0),
        helper.make_node("Pad", ["x", "pads"], ["y"]),
    ]
    constants = [numpy_helper.from_array(np.array(v, np.int64), n) for n, v in (("begin", [0, 1]), ("end", [0, 2]))]
    result = _build(write(tmp_path, model(nodes, outputs=[tensor("y", ["N", 19])], initializers=constants), ONNX_SPEC))
    graph = _graph(result)
    assert [n.op_type for n in graph.node] == ["Pad"]
    pads = {i.name: onnx.numpy_helper.to_array(i).tolist() for i in graph.initializer}[graph.node[0].input[1]]
    assert pads == [0, 1, 0, 2]


RETURNS = {
    "dataclass": "Result(x + 1, None, x * 2)",
    "namedtuple": "Pair(x + 1, None, x * 2)",
    "dict": '{"scores": x * 2, "nothing": None, "labels": x + 1}',
    "tuple": "(x + 1, None, x * 2)",
    "list": "[x + 1, None, x * 2]",
}


@pytest.mark.parametrize("kind", RETURNS)
def test_outputs_of_every_form_have_the_same_names_in_the_file_and_the_manifest(project, kind):
    path = project(
        f"""
        import collections, dataclasses

        @dataclasses.dataclass
        class Result:
            labels: torch.Tensor
            nothing: object
            scores: torch.Tensor

        Pair = collections.namedtuple("Pair", ["labels", "nothing", "scores"])

        class Model(nn.Module):
            def forward(self, x):
                return {RETURNS[kind]}
        build = Model
        """,
        SPEC.replace("  - {name: y, dtype: float32}", "  - {name: labels}\n  - {name: scores}"),
    )
    result = _build(path)
    assert [o["name"] for o in result.published.manifest["outputs"]] == ["labels", "scores"]
    assert [o.name for o in _graph(result).output] == ["labels", "scores"]
    labels, scores = _run(result, x=np.full((1, 16), 5, np.float32))
    assert (labels == 6).all() and (scores == 10).all()


def test_two_processes_write_the_same_bytes(project, tmp_path):
    """Attention is what the fusions rewrite most; hash seeds differ between the processes."""
    path = project(
        """
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                torch.manual_seed(0)
                self.a, self.b, self.norm = nn.Linear(16, 16), nn.Linear(16, 16), nn.LayerNorm(16)
            def forward(self, x):
                return self.norm(x + nn.functional.gelu(self.a(x)) + self.b(x))
        build = Model
        """
    )
    for name, seed in (("one", "1"), ("two", "2")):
        done = run_compile("build", path, "-r", tmp_path / name, PYTHONHASHSEED=seed)
        assert done.returncode == 0, done.stderr
    one, two = ({p.name: p.read_bytes() for p in (tmp_path / n / "small").rglob("*.onnx")} for n in ("one", "two"))
    assert list(one) == ["model.onnx"] and one == two
    configs = [(tmp_path / n / "small" / "config.pbtxt").read_bytes() for n in ("one", "two")]
    assert configs[0] == configs[1]


def test_a13_the_exporter_is_chosen_by_name_and_recorded(project, monkeypatch):
    """torch 2.9 changed its default; what is not left to a default cannot change under us."""
    import torch

    seen = {}
    real = torch.onnx.export

    def export(*args, **options):
        seen.update(options)
        return real(*args, **options)

    monkeypatch.setattr(torch.onnx, "export", export)
    path = project("class Model(nn.Module):\n    def forward(self, x):\n        return x + 1\nbuild = Model\n")
    manifest = _build(path).published.manifest
    assert seen["dynamo"] is True and seen["opset_version"] == manifest["opset"] == 20
    # No arguments of the older exporter, which the newer one refuses or ignores.
    assert not {"dynamic_axes", "do_constant_folding", "export_params", "training"} & set(seen)
    assert manifest["exporter"] == f"torch.onnx.export(dynamo=True), torch {torch.__version__}"
