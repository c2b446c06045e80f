from __future__ import annotations

import pytest

from compiler.errors import SpecError
from compiler.spec import model_spec_from_file
from compiler.tensors import Dim

GOOD = """\
name: encoder
source:
  factory: pkg.mod:build
dims:
  batch: {min: 1, opt: 8, max: 32}
  length: {max: 256}
inputs:
  - {name: ids, dtype: int64, shape: [batch, length], range: [0, 99]}
  - {name: mask, dtype: int64, shape: [batch, length], values: padding_mask}
outputs:
  - {name: y, dtype: float32, shape: [batch, 384]}
"""


def _spec(tmp_path, text=GOOD):
    path = tmp_path / "s.yaml"
    path.write_text(text)
    return model_spec_from_file(path)


def test_good_spec_with_its_defaults(tmp_path):
    spec = _spec(tmp_path)
    assert spec.dims == {"batch": Dim("batch", 1, 8, 32), "length": Dim("length", 1, 256, 256)}
    assert spec.max_batch_size == 32
    assert (spec.target, spec.precision, spec.opset) == ("onnxruntime", "fp32", 20)
    assert spec.inputs[1].range == (0, 1)
    assert spec.serving.instances == 1


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("name: encoder", "name: ../../x", r":1: name is '\.\./\.\./x'; allowed: "),
        ("name: encoder", 'name: "a b"', r":1: name is 'a b'"),
        ("name: encoder", 'name: ".."', r":1: name is '\.\.'"),
        ("name: encoder", 'name: "a\\nb"', r":1: name is 'a\\nb'"),
        ("name: encoder", 'name: ""', r":1: name must be a non-empty string"),
        ("name: encoder", f"name: {'a' * 129}", r":1: name is"),
        ("pkg.mod:build", "pkg.mod", r":3: source.factory is 'pkg.mod'; allowed: 'package.module:function'"),
        ("max: 32}", "max: 4}", r":5: opt of dim 'batch' is 8; allowed: 1 to 4"),
        ("{min: 1, opt: 8, max: 32}", "{min: 9, opt: 8, max: 8}", r":5: dim 'batch' has min 9 above max 8"),
        ("{min: 1, opt: 8, max: 32}", "{min: 2, max: 8}", r":5: min of dim 'batch' is 2; it must be 1"),
        ("{max: 256}", "{max: 0}", r":6: max of dim 'length' is 0; allowed: 1 to"),
        ("{max: 256}", "{max: 25.6}", r":6: max of dim 'length' must be a whole number, not 25.6"),
        ("{max: 256}", "{maximum: 256}", r":6: unknown key 'maximum' in dim 'length'.*; allowed: max, min, opt"),
        ("int64, shape: [batch, length], range", "int46, shape: [batch, length], range", r":8: .*did you mean 'int64'"),
        ("[batch, length], range", "[batch, lenght], range", r":8: .*unknown dim 'lenght' \(did you mean 'length'\?\)"),
        ("[batch, length], range", "[batch, -1], range", r":8: a size in the shape of input 'ids' is -1"),
        ("[batch, length], range", "[batch, batch], range", r":8: .*same dim on two axes"),
        (", range: [0, 99]", "", r":8: input 'ids' is int64 and lacks the key 'range'"),
        ("range: [0, 99]", "range: [9, 0]", r":8: range of input 'ids' is \[9, 0\]: the smallest is above"),
        ("range: [0, 99]", "range: [0, 1e99]", r":8: range of input 'ids' must be a whole number"),
        ("range: [0, 99]", "range: [0]", r":8: range of input 'ids' needs two numbers"),
        ("name: mask, dtype: int64", "name: ids, dtype: int64", r":7: two inputs are named 'ids'"),
        ("name: mask,", 'name: "m ask",', r":9: input name is 'm ask'"),
        ("[batch, 384]", "[384, batch]", r":1: the first axis of 'y' is 384, not 'batch'"),
        (
            "outputs:",
            "target: tensort\noutputs:",
            r":10: target is 'tensort' .*; allowed: auto, onnxruntime, openvino, ",
        ),
        (
            "outputs:",
            "precision: fp8\noutputs:",
            r":10: precision is 'fp8'.*; allowed: auto, bf16, fp16, fp32, int8, int8_dynamic",
        ),
        ("outputs:", "opset: 7\noutputs:", r":10: opset is 7; allowed: 18, 20"),
        ("outputs:", "tolerance: {atol: -1}\noutputs:", r":10: tolerance.atol is -1; allowed: 0 to inf"),
        ("outputs:", "serving: {instances: 0}\noutputs:", r":10: serving.instances is 0; allowed: 1 to 1024"),
    ],
)
def test_wrong_specs_name_line_value_and_allowed(tmp_path, old, new, message):
    assert old in GOOD
    with pytest.raises(SpecError, match=message):
        _spec(tmp_path, GOOD.replace(old, new, 1))


def test_a_dim_that_no_input_has(tmp_path):
    with pytest.raises(SpecError, match=r":7: no input has the dim 'width'; dims of the inputs: batch, length"):
        _spec(tmp_path, GOOD.replace("inputs:", "  width: {max: 3}\ninputs:", 1))


def test_c05_a_variable_first_axis_must_be_called_batch(tmp_path):
    """Triton's auto-complete would batch along it, whatever we wrote."""
    text = GOOD.replace("  batch: {min: 1, opt: 8, max: 32}\n", "  rows: {max: 8}\n").replace("[batch", "[rows")
    with pytest.raises(SpecError, match="every tensor starts with a variable dim"):
        _spec(tmp_path, text)


def test_c01_a_model_without_a_batch_dim_has_max_batch_size_0(tmp_path):
    text = """\
name: fixed
source: {factory: a:b}
inputs: [{name: x, dtype: float32, shape: [1, 3, 8, 8]}]
outputs: [{name: y}]
"""
    assert _spec(tmp_path, text).max_batch_size == 0


ALLOWED = "exactly one is required of: exported_program, factory, huggingface, onnx, python"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{weights: w.pt}", f"2: source has no kind: it holds 'weights'; {ALLOWED}"),
        ("{onxx: m.onnx}", f"2: source has no kind: it holds 'onxx' (did you mean 'onnx'?); {ALLOWED}"),
        ("{}", f"2: source has no kind: it holds nothing; {ALLOWED}"),
        ("m.onnx", "2: source must be a mapping, not 'm.onnx'"),
        (
            "\n  onnx: m.onnx\n  factory: a:b",
            "4: source has two kinds: factory and onnx; exactly one is allowed",
        ),
        ("\n  onnx: m.onnx\n  weights: w.pt", "4: unknown key 'weights' in source; allowed: onnx"),
        ("\n  onnx:", "3: source.onnx must be a non-empty string, not nothing"),
        (
            "\n  exported_program: m.pt2\n  args: {}",
            "4: unknown key 'args' in source; allowed: exported_program",
        ),
        ("{huggingface: f}", "2: source lacks the key 'model_class'; required: huggingface, model_class"),
        (
            "\n  huggingface: f\n  model_class: a.B",
            "4: source.model_class is 'a.B'; allowed: the name of a class of transformers, such as AutoModel",
        ),
        (
            "\n  huggingface: f\n  model_class: AutoModel\n  trust_remote_code: true",
            "5: unknown key 'trust_remote_code' in source; allowed: huggingface, ignore_weights, model_class",
        ),
    ],
)
def test_a_source_has_exactly_one_kind_and_its_keys(tmp_path, source, message):
    with pytest.raises(SpecError) as error:
        _spec(tmp_path, GOOD.replace("\n  factory: pkg.mod:build", f" {source}"))
    assert str(error.value) == f"{tmp_path}/s.yaml:{message}"


def test_an_input_and_an_output_of_one_name_are_refused(tmp_path):
    path = tmp_path / "s.yaml"
    path.write_text(GOOD.replace("outputs:", "outputs:\n  - {name: ids}"))
    with pytest.raises(SpecError, match=r"an input and an output are both named 'ids'.*\n  hint: call the output"):
        model_spec_from_file(path)


@pytest.mark.parametrize("which", ["input", "output"])
def test_d14_two_tensors_of_one_name_are_refused(tmp_path, which):
    """A backend would use the first and drop the other."""
    line = next(x for x in GOOD.splitlines() if x.startswith("  - {name: " + {"input": "ids", "output": "y"}[which]))
    path = tmp_path / "s.yaml"
    path.write_text(GOOD.replace(line, f"{line}\n{line}"))
    with pytest.raises(SpecError, match=f"two {which}s are named"):
        model_spec_from_file(path)
