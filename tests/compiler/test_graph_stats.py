from __future__ import annotations

import json

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from compiler.cases import Case
from compiler.explain import explanation, explanation_lines
from compiler.graph_stats import graph_stats
from compiler.pipeline import compile_model
from compiler.repository import Repository
from compiler.spec import model_spec_from_file
from tests.compiler.test_cli import MODEL
from tests.serving import run_compile

pytestmark = pytest.mark.usefixtures("exporter_library")  # once for all exports of this module


def _model(nodes, weights, shape):
    graph = onnx.helper.make_graph(
        nodes,
        "g",
        [onnx.helper.make_tensor_value_info("x", 1, shape)],
        [onnx.helper.make_empty_tensor_value_info("y")],
        [onnx.numpy_helper.from_array(w, n) for n, w in weights.items()],
    )
    return ir.from_proto(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 20)], ir_version=10))


def _case(*shape: int) -> Case:
    return Case("c", {}, {"x": np.ones(shape, dtype=np.float32)})


def test_matmul_and_relu_by_hand():
    nodes = [
        onnx.helper.make_node("MatMul", ["x", "w"], ["h"]),
        onnx.helper.make_node("Relu", ["h"], ["y"]),
    ]
    stats = graph_stats(_model(nodes, {"w": np.ones((16, 3), np.float32)}, ["b", 16]), _case(4, 16))
    assert (stats.nodes, stats.ops, stats.parameters) == (2, {"MatMul": 1, "Relu": 1}, 48)
    assert stats.flops == 2 * 4 * 3 * 16 + 4 * 3
    assert stats.bytes_moved == 4 * ((4 * 16 + 16 * 3 + 4 * 3) + (4 * 3 + 4 * 3))


def test_convolution_with_groups_by_hand():
    node = onnx.helper.make_node("Conv", ["x", "w"], ["y"], group=2, kernel_shape=[3, 3])
    stats = graph_stats(_model([node], {"w": np.ones((8, 2, 3, 3), np.float32)}, [1, 4, 10, 10]), _case(1, 4, 10, 10))
    assert stats.flops == 2 * (1 * 8 * 8 * 8) * (2 * 3 * 3)


@pytest.mark.parametrize(("trans", "shape"), [(0, (5, 7)), (1, (7, 5))])
def test_gemm_counts_the_inner_axis(trans, shape):
    node = onnx.helper.make_node("Gemm", ["x", "w"], ["y"], transA=trans)
    stats = graph_stats(_model([node], {"w": np.ones((7, 3), np.float32)}, list(shape)), _case(*shape))
    assert stats.flops == 2 * 5 * 3 * 7


def test_explain_shows_the_graph_before_and_after(project):
    path = project(MODEL)
    repository = Repository(path.parent / "repo")
    compile_model(model_spec_from_file(path), repository)
    found = explanation(repository.find("small"))
    assert found["before"]["parameters"] >= 51 and found["sizes"] == {"batch": 4}
    text = "\n".join(explanation_lines(found))
    assert "floating-point operations" in text and "fold_constants" in text
    done = run_compile("explain", "small", "-r", repository.path, "--json")
    assert json.loads(done.stdout)["after"] == found["after"]
    assert run_compile("explain", "small", "-r", repository.path).stdout.rstrip("\n") == text
