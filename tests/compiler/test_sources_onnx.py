"""ONNX files as a source: the file as given is the oracle, and what it does not have is refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from compiler.errors import ModelkilnError, ModelRefused, SpecError
from compiler.manifest import BuildResult
from compiler.pipeline import compile_model
from compiler.repository import Repository
from compiler.spec import model_spec_from_file
from tests.compiler.onnx_models import BIAS, SPEC, WEIGHT, external_model, model, tensor, write
from tests.serving import environment, run_compile


def _build(spec: Path) -> BuildResult:
    return compile_model(model_spec_from_file(spec), Repository(spec.parent / "repo"))


def _refused(spec: Path, kind: type[ModelkilnError] = ModelRefused) -> str:
    """Builds, expects a refusal, and checks that nothing was published."""
    with pytest.raises(kind) as error:
        _build(spec)
    assert not (spec.parent / "repo").exists()
    return str(error.value)


def _graph(result: BuildResult) -> onnx.GraphProto:
    return onnx.load(str(result.published.folder / "model.onnx")).graph


def _dims(value: onnx.ValueInfoProto) -> list:
    return [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]


def _run(result: BuildResult, **inputs: np.ndarray) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(str(result.published.folder / "model.onnx"))
    return dict(zip([o.name for o in session.get_outputs()], session.run(None, inputs), strict=True))


def test_an_onnx_file_is_built_through_the_command_and_again_does_nothing_without_torch(tmp_path):
    spec = write(tmp_path, external_model())
    (tmp_path / "w.bin").write_bytes(WEIGHT.tobytes())
    done = run_compile("build", spec, "-r", tmp_path / "repo")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("linear version 1: built in ")
    assert "model.onnx: 51 parameters, opset 20, from an unknown producer" in done.stderr
    code = f"""
import sys
from compiler.cli import main
main(["build", {str(spec)!r}, "-r", {str(tmp_path / "repo")!r}], standalone_mode=False)
print([m for m in ("torch", "onnxruntime", "transformers", "onnxscript") if m in sys.modules])
"""
    again = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=True)
    first, second = again.stdout.splitlines()
    assert first.startswith("linear version 1: up to date in ") and second == "[]"
    # The external data counts as much as the file that names it.
    (tmp_path / "w.bin").write_bytes((WEIGHT + 1).tobytes())
    assert run_compile("build", spec, "-r", tmp_path / "repo").stdout.startswith("linear version 2: built")


def test_the_shipped_file_holds_the_external_data_and_answers_as_numpy_does(tmp_path):
    spec = write(tmp_path, external_model(offset=8))
    (tmp_path / "w.bin").write_bytes(bytes(8) + WEIGHT.tobytes())
    result = _build(spec)
    assert sorted(p.name for p in result.published.folder.iterdir()) == ["manifest.json", "model.onnx", "reference.npz"]
    x = np.random.default_rng(1).standard_normal((5, 16)).astype(np.float32)
    assert np.allclose(_run(result, x=x)["y"], x @ WEIGHT + BIAS, atol=1e-5)
    assert list(result.published.manifest["made_from"]["files"]) == ["model.onnx", "w.bin"]
    assert result.published.manifest["exporter"] == "none: the file of an unknown producer"


def test_the_oracle_is_the_file_as_given_not_what_a_pass_made_of_it(tmp_path, monkeypatch):
    """A seeded fault in the graph that was taken over is found by the parity with the file."""
    from compiler.sources import onnx_file

    real = onnx_file.graph_for_spec

    def damaged(proto, spec):
        proto.graph.initializer[0].CopyFrom(numpy_helper.from_array(WEIGHT + 0.01, "w"))
        return real(proto, spec)

    monkeypatch.setattr(onnx_file, "graph_for_spec", damaged)
    assert "the compiled file does not answer as the model does" in _refused(write(tmp_path, model()))


def test_the_oracle_runs_without_graph_optimisation(tmp_path, monkeypatch):
    seen = []
    real = onnxruntime.InferenceSession

    class Session(real):
        def __init__(self, path, options, **more):
            seen.append((Path(path).name, options.graph_optimization_level))
            super().__init__(path, options, **more)

    monkeypatch.setattr(onnxruntime, "InferenceSession", Session)
    spec = write(tmp_path, model())
    (tmp_path / "model.onnx").rename(tmp_path / "given.onnx")
    spec.write_text(spec.read_text().replace("model.onnx", "given.onnx"))
    _build(spec)
    assert [level for name, level in seen if name == "given.onnx"] == [
        onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    ]


def test_dims_get_the_names_of_the_spec_in_all_of_the_graph(tmp_path):
    proto = model()
    proto.graph.value_info.append(tensor("h", ["N", 3]))
    proto.graph.output[0].CopyFrom(tensor("y", ["batch", 3]))  # the file's 'batch' is not the spec's
    graph = _graph(_build(write(tmp_path, proto)))
    assert _dims(graph.input[0]) == ["batch", 16]
    assert _dims(graph.output[0]) == ["file_batch", 3]


def test_open_dims_are_filled_in_from_the_spec(tmp_path):
    proto = model(inputs=[tensor("x", [None, None])], outputs=[tensor("y", [None, None])])
    spec = write(tmp_path, proto, SPEC.replace("{name: y, dtype: float32}", "{name: y, shape: [batch, 3]}"))
    graph = _graph(_build(spec))
    assert _dims(graph.input[0]) == ["batch", 16] and _dims(graph.output[0]) == ["batch", 3]


def test_an_output_without_a_rank_is_refused(tmp_path):
    message = _refused(write(tmp_path, model(outputs=[tensor("y", None)])))
    assert message.startswith("model.onnx is not a valid ONNX model: ") and "'shape'" in message


def test_a_fixed_size_where_the_spec_is_dynamic_is_refused_by_name_and_number(tmp_path):
    assert _refused(write(tmp_path, model(inputs=[tensor("x", [4, 16])], outputs=[tensor("y", [4, 3])]))) == (
        "'x' axis 0: the spec's dim 'batch' is the fixed number 4 in the graph, made by the graph's input\n"
        "  hint: export the file again with this axis dynamic, or write the file's number into the spec"
    )


def test_another_fixed_size_than_the_spec_is_refused(tmp_path):
    assert _refused(write(tmp_path, model(), SPEC.replace("[batch, 16]", "[batch, 8]"))) == (
        "'x' axis 1: the spec says 8, the graph 16"
    )


def test_a_baked_size_inside_the_file_is_found_by_running_it(tmp_path):
    shape = numpy_helper.from_array(np.array([4, 16]), "s")
    nodes = [helper.make_node("Reshape", ["x", "s"], ["y"])]
    spec = write(tmp_path, model(nodes, outputs=[tensor("y", ["N", 16])], initializers=[shape]))
    message = _refused(spec)
    assert message.startswith("model.onnx itself fails at export[batch=3]: ") and "batch 1..8" in message


def test_inputs_and_outputs_are_matched_by_name(tmp_path):
    nodes = [helper.make_node("MatMul", ["pixels", "w"], ["h"]), helper.make_node("Add", ["h", "b"], ["y"])]
    spec = write(tmp_path, model(nodes, [tensor("pixels", ["N", 16])]), SPEC.replace("name: x,", "name: pixel,"))
    assert _refused(spec, SpecError) == (
        f"{spec}:6: the file has no input 'pixel' (did you mean 'pixels'?); its inputs: pixels"
    )
    spec = write(tmp_path, model(), SPEC.replace("name: y,", "name: logits,"))
    assert _refused(spec, SpecError) == f"{spec}:8: the file has no output 'logits'; its outputs: y"
    spec = write(tmp_path, model(inputs=[tensor("x", ["N", 16]), tensor("scale", [1])]))
    assert _refused(spec, SpecError) == f"{spec}:5: the file needs the input 'scale', which the spec lacks; it has: x"
    spec = write(tmp_path, model(), SPEC.replace("x, dtype: float32", "x, dtype: float16"))
    assert _refused(spec, SpecError) == f"{spec}:6: input 'x' is float32 in the file, the spec says float16"


def test_a10_inputs_are_bound_by_name_and_ordered_as_in_the_spec(tmp_path):
    nodes = [helper.make_node("Sub", ["a", "b"], ["y"])]
    proto = model(nodes, [tensor("b", ["N", 2]), tensor("a", ["N", 2])], [tensor("y", ["N", 2])], [])
    inputs = "  - {name: a, dtype: float32, shape: [batch, 2]}\n  - {name: b, dtype: float32, shape: [batch, 2]}"
    spec = write(tmp_path, proto, SPEC.replace("  - {name: x, dtype: float32, shape: [batch, 16]}", inputs))
    result = _build(spec)
    assert [i.name for i in _graph(result).input] == ["a", "b"]
    one, two = np.full((1, 2), 5, np.float32), np.full((1, 2), 3, np.float32)
    assert (_run(result, a=one, b=two)["y"] == 2).all()


def test_outputs_that_the_spec_does_not_name_are_left_out_with_what_made_them(tmp_path):
    nodes = [helper.make_node("Relu", ["x"], ["y"]), helper.make_node("Exp", ["x"], ["other"])]
    proto = model(nodes, outputs=[tensor("other", ["N", 16]), tensor("y", ["N", 16])], initializers=[])
    result = _build(write(tmp_path, proto))
    assert [o.name for o in _graph(result).output] == ["y"]
    assert [n.op_type for n in _graph(result).node] == ["Relu"]
    assert result.published.manifest["source"]["notes"] == [
        "note: outputs that the spec does not name were left out: other"
    ]


def test_weights_that_an_old_file_lists_as_inputs_are_constants(tmp_path):
    inputs = [tensor("x", ["N", 16]), tensor("w", [16, 3]), tensor("b", [3])]
    proto = model(inputs=inputs)
    proto.ir_version = 3
    result = _build(write(tmp_path, proto))
    assert [i.name for i in _graph(result).input] == ["x"]
    assert result.published.manifest["source"]["notes"] == [
        "note: 2 weights were listed as inputs too; they are constants now"
    ]
    spec = write(tmp_path, proto, SPEC.replace("name: x,", "name: w,"))
    with pytest.raises(SpecError, match=r"spec.yaml:6: the file has no input 'w'; its inputs: x"):
        _build(spec)


def test_an_opset_below_13_is_converted_and_says_so(tmp_path):
    nodes = [helper.make_node("Squeeze", ["x"], ["y"], axes=[1])]  # an attribute until opset 12
    proto = model(nodes, [tensor("x", ["N", 1, 4])], [tensor("y", ["N", 4])], [], opset=11)
    result = _build(write(tmp_path, proto, SPEC.replace("[batch, 16]", "[batch, 1, 4]")))
    assert result.published.manifest["opset"] == 20
    assert result.published.manifest["source"]["notes"] == [
        "note: converted from opset 11 to 20 with onnx's version converter"
    ]


def test_a14_an_opset_that_the_spec_names_is_what_the_file_gets_or_it_is_refused(tmp_path):
    result = _build(write(tmp_path, model(opset=13), "opset: 18\n" + SPEC))
    shipped = onnx.load(str(result.published.folder / "model.onnx"))
    assert [(i.domain, i.version) for i in shipped.opset_import if i.domain == ""] == [("", 18)]
    (tmp_path / "kept").mkdir()
    assert _build(write(tmp_path / "kept", model(opset=13))).published.manifest["opset"] == 13
    gelu = model([helper.make_node("Gelu", ["x"], ["y"])], outputs=[tensor("y", ["N", 16])], initializers=[])
    message = _refused(write(tmp_path / "gelu", gelu, "opset: 18\n" + SPEC))
    assert message.startswith(
        "model.onnx has opset 20, the spec asks for opset 18, and onnx's converter fails: "
    ) and message.endswith("hint: export it again with opset 18")


def test_an_opset_of_the_future_is_refused(tmp_path):
    newest = onnx.defs.onnx_opset_version()
    assert _refused(write(tmp_path, model(opset=99))) == (
        f"model.onnx has opset 99; allowed: 1 to {newest}, the newest that onnx {onnx.__version__} knows\n"
        "  hint: export it again with an opset of 20"
    )


def test_custom_operators_are_refused_by_domain_and_name(tmp_path):
    branch = helper.make_graph(
        [helper.make_node("Hidden", ["x"], ["r"], domain="acme.deep")], "b", [], [tensor("r", ["N", 16])]
    )
    nodes = [
        helper.make_node("Fancy", ["x"], ["t"], domain="acme"),
        helper.make_node("If", ["flag"], ["y"], then_branch=branch, else_branch=branch),
    ]
    flag = numpy_helper.from_array(np.array(True), "flag")
    proto = model(nodes, outputs=[tensor("y", ["N", 16])], initializers=[flag])
    proto.opset_import.add(domain="acme", version=1)
    assert _refused(write(tmp_path, proto)).splitlines()[0] == (
        "model.onnx uses operators of domains that ONNX Runtime does not have: 'acme' (Fancy); 'acme.deep' (Hidden)"
    )


def test_operators_of_onnxruntime_and_functions_of_the_file_are_taken(tmp_path):
    body = [helper.make_node("Add", ["a", "a"], ["r"])]
    function = helper.make_function("own", "Twice", ["a"], ["r"], body, [helper.make_opsetid("", 20)])
    nodes = [
        helper.make_node("Twice", ["x"], ["t"], domain="own"),
        helper.make_node("BiasGelu", ["t", "b"], ["y"], domain="com.microsoft"),
    ]
    bias = numpy_helper.from_array(np.zeros(16, np.float32), "b")
    proto = model(nodes, outputs=[tensor("y", ["N", 16])], initializers=[bias], functions=[function])
    for domain in ("own", "com.microsoft"):
        proto.opset_import.add(domain=domain, version=1)
    assert _build(write(tmp_path, proto)).built


@pytest.mark.parametrize(
    ("content", "wrong"),
    [(b"", "it has no graph"), (b"\xff" * 40, "Error parsing"), (b"PK\x03\x04 not a model", "Error parsing")],
    ids=["empty", "noise", "zip"],
)
def test_what_is_not_an_onnx_file(tmp_path, content, wrong):
    spec = write(tmp_path, model())
    (tmp_path / "model.onnx").write_bytes(content)
    message = _refused(spec)
    assert message.startswith("model.onnx is not a valid ONNX file: ") and wrong in message


def test_a_graph_that_the_checker_refuses(tmp_path):
    proto = model()
    proto.graph.node[0].input[0] = "nowhere"
    message = _refused(write(tmp_path, proto))
    assert message.startswith("model.onnx is not a valid ONNX model: ") and "nowhere" in message


def test_an_operator_that_onnxruntime_cannot_run_is_named(tmp_path):
    nodes = [helper.make_node("NoSuchOp", ["x"], ["y"], domain="com.microsoft")]
    proto = model(nodes, outputs=[tensor("y", ["N", 16])], initializers=[])
    proto.opset_import.add(domain="com.microsoft", version=1)
    message = _refused(write(tmp_path, proto))
    assert message.startswith(f"ONNX Runtime {onnxruntime.__version__} cannot load model.onnx as given: ")
    assert "NoSuchOp" in message


def test_a_file_that_answers_nan_is_refused(tmp_path):
    nodes = [helper.make_node("Log", ["x"], ["y"])]
    message = _refused(write(tmp_path, model(nodes, outputs=[tensor("y", ["N", 16])], initializers=[])))
    assert message.startswith("model.onnx itself answers NaN or infinity at ")


def test_an_input_that_is_not_a_tensor_is_refused(tmp_path):
    value = helper.make_tensor_sequence_value_info("x", TensorProto.FLOAT, ["N", 16])
    nodes = [helper.make_node("ConcatFromSequence", ["x"], ["y"], axis=0)]
    spec = write(tmp_path, model(nodes, [value], [tensor("y", ["N", 16])], []))
    assert _refused(spec, SpecError) == (
        f"{spec}:6: input 'x' of the file is not a tensor, which is all that Triton sends"
    )


def test_two_processes_write_the_same_bytes(tmp_path):
    spec = write(tmp_path, model())
    for repository in ("one", "two"):
        assert run_compile("build", spec, "-r", tmp_path / repository, fresh=True).returncode == 0
    one, two = (tmp_path / r / "linear" / "1" / "model.onnx" for r in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()


def test_a_package_path_is_found_without_importing_it(tmp_path, monkeypatch):
    write(tmp_path / "mk_onnx_bait", model())
    (tmp_path / "mk_onnx_bait" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = tmp_path / "spec.yaml"
    spec.write_text(SPEC.replace("model.onnx", "package:mk_onnx_bait/model.onnx").lstrip())
    assert json.loads(json.dumps(_build(spec).published.manifest))["source"]["trusted"] == []


def test_names_as_other_exporters_write_them_are_taken_served_and_proved_again(tmp_path):
    """TensorFlow's `input_1:0`, Paddle's `save_infer_model/scale_0.tmp_1`, a bare number."""
    from compiler.recorded import verify_again

    nodes = [
        helper.make_node("Relu", ["input_1:0"], ["save/scale_0.tmp_1"]),
        helper.make_node("Neg", ["input_1:0"], ["4195"]),
    ]
    proto = model(
        nodes, [tensor("input_1:0", [-1, 16])], [tensor(n, [-1, 16]) for n in ("save/scale_0.tmp_1", "4195")], []
    )
    text = SPEC.replace("name: x,", "name: 'input_1:0',")
    text = text.replace("{name: y, dtype: float32}", "{name: save/scale_0.tmp_1}\n  - {name: '4195'}")
    spec = write(tmp_path, proto, text)
    result = _build(spec)
    x = np.linspace(-1, 1, 32, dtype=np.float32).reshape(2, 16)
    got = _run(result, **{"input_1:0": x})
    assert np.array_equal(got["save/scale_0.tmp_1"], np.maximum(x, 0)) and np.array_equal(got["4195"], -x)
    repository = Repository(spec.parent / "repo")
    assert not verify_again(repository, repository.latest("linear")).failures
    # -1 is how Paddle writes a size that is not known: it is no number.
    assert _dims(_graph(result).input[0]) == ["batch", 16]


def test_a_graph_that_draws_random_numbers_is_refused(tmp_path):
    nodes = [
        helper.make_node("RandomNormalLike", ["x"], ["n"], name="noise"),
        helper.make_node("Add", ["x", "n"], ["y"]),
    ]
    message = _refused(write(tmp_path, model(nodes, outputs=[tensor("y", ["N", 16])], initializers=[])))
    assert message.startswith("node 'noise' (RandomNormalLike) draws random numbers\n  hint: ")
