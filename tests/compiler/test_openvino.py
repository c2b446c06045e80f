"""The openvino target: which precision the CPU plugin computes in, said, read back and refused where it was lost."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from compiler.candidates import choices_for
from compiler.errors import ModelRefused
from compiler.optimise import Choice
from compiler.precision import support
from compiler.spec import Serving, model_spec_from_file
from compiler.targets.openvino import HINT, TARGET, inference_precision, parameters, refuse_lost_precision
from tests.compiler.conftest import SPEC
from tests.serving import run_compile

needs_bf16 = pytest.mark.skipif(not support.computes_bf16(), reason="this CPU has no bf16 instructions")
WITH_BF16, WITHOUT = frozenset({"avx2", "avx512_bf16"}), frozenset({"avx2"})

# The second model loses everything in bf16: what differs between its columns is below the last bit of their sums.
MODEL = """
class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 8)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))

class Cancels(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.ones(16, 8) + 1e-3 * torch.randn(16, 8))

    def forward(self, x):
        y = (x / 8 + 1) @ self.weight
        return y - y.mean(-1, keepdim=True)

class Integers(nn.Module):
    def forward(self, x):
        return x.to(torch.int32) * 3
"""


def _build(project, function: str, *flags: str, spec: str = SPEC):
    path = project(MODEL, spec, function)
    return run_compile("build", path, "-r", path.parent / "repo", "--json", *flags), path.parent / "repo"


def _spec(project, extra: str) -> Path:
    return project(MODEL, SPEC + extra, "Layers")


@needs_bf16
def test_bf16_is_computed_in_bf16_and_every_place_says_so(project):
    done, repository = _build(project, "Layers", "--target", "openvino", "--precision", "bf16")
    assert done.returncode == 0, done.stderr
    manifest = json.loads(done.stdout)["models"][0]["manifest"]
    assert manifest["precision"] == "bf16" and manifest["artifact"][HINT] == "bf16"
    assert manifest["artifact"]["nodes_by_precision"]["bf16"] >= 2
    assert manifest["parity"]["worst_cosine"] >= 0.999
    config = (repository / "small" / "config.pbtxt").read_text()
    assert 'key: "INFERENCE_PRECISION_HINT"' in config and 'string_value: "bf16"' in config
    # The graph that ships is fp32: the plugin makes bf16 of it, and only with the property.
    folder = repository / "small" / "1"
    x = np.random.default_rng(0).standard_normal((4, 16)).astype(np.float32)
    low, exact = (TARGET.open(folder, 1, {HINT: hint})({"x": x})["y"] for hint in ("bf16", "f32"))
    error = np.abs(low - exact).max() / np.abs(exact).max()
    assert 1e-4 < error < 2e-2
    again = run_compile("verify", "small", "-r", repository, "--json")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["parity"]["max_abs"] > 1e-5  # proved again as it is served, not in fp32


@needs_bf16
def test_auto_tries_bf16_and_does_not_ship_what_loses_too_much(project):
    done, _ = _build(project, "Cancels", "--target", "auto", "--precision", "auto")
    assert done.returncode == 0, done.stderr
    manifest = json.loads(done.stdout)["models"][0]["manifest"]
    candidates = {(c["target"], c["precision"]): c for c in manifest["candidates"]}
    refused = candidates["openvino", "bf16"]
    assert refused["worst_cosine"] < 0.999 and "is below 0.999" in refused["refused"]
    assert refused["latency_ms"] is None and manifest["precision"] == "fp32"


@needs_bf16
def test_b20_a_precision_that_no_node_has_is_refused(project):
    spec = SPEC.replace("{name: y, dtype: float32}", "{name: y, dtype: int32}")
    done, _ = _build(project, "Integers", "--target", "openvino", "--precision", "bf16", spec=spec)
    assert done.returncode == 1 and "OpenVINO executes no node in it" in done.stderr


def test_b20_what_was_executed_is_compared_with_what_was_asked():
    refuse_lost_precision("bf16", {"f32": 3, "bf16": 1})
    refuse_lost_precision("int8", {"f32": 3, "u8": 1})
    refuse_lost_precision("fp32", {"f32": 3})
    for asked, executed in (("bf16", {"f32": 4}), ("int8", {"bf16": 4, "f32": 1}), ("int8", {})):
        with pytest.raises(ModelRefused, match=f"precision {asked} was asked for, and OpenVINO executes no node"):
            refuse_lost_precision(asked, executed)


def test_b12_bf16_is_refused_before_any_work_where_the_cpu_has_none(project, monkeypatch):
    monkeypatch.setattr(support, "cpu_flags", lambda: WITHOUT)
    spec = model_spec_from_file(_spec(project, "target: openvino\nprecision: bf16\n"))
    with pytest.raises(ModelRefused, match=r"this CPU has none of avx512_bf16, amx_bf16, bf16\."):
        choices_for(spec)


@pytest.mark.parametrize(("flags", "tried"), [(WITH_BF16, True), (WITHOUT, False)])
def test_auto_tries_what_this_cpu_computes(project, monkeypatch, flags, tried):
    monkeypatch.setattr(support, "cpu_flags", lambda: flags)
    found = choices_for(model_spec_from_file(_spec(project, "target: auto\nprecision: auto\n")))
    assert (Choice("openvino", "bf16") in found) is tried
    assert {Choice("onnxruntime", "fp32"), Choice("openvino", "fp32")} <= set(found)
    # Casts around every node are never faster, and int8 has no data to take its ranges from.
    assert not {str(c) for c in found} & {"onnxruntime fp16", "openvino fp16", "openvino int8", "onnxruntime int8"}


@pytest.mark.parametrize(("flags", "rest"), [(WITH_BF16, "bf16"), (WITHOUT, "f32")])
def test_what_int8_leaves_is_bf16_where_the_cpu_has_it(monkeypatch, flags, rest):
    monkeypatch.setattr(support, "cpu_flags", lambda: flags)
    assert [inference_precision(p) for p in ("fp32", "fp16", "bf16", "int8")] == ["f32", "f32", "bf16", rest]


def test_the_parameters_are_those_that_were_proved():
    assert parameters(Serving(threads=2), {HINT: "bf16"}) == {
        "INFERENCE_PRECISION_HINT": "bf16", "NUM_STREAMS": "1", "INFERENCE_NUM_THREADS": "2",
    }  # fmt: skip
    # A version from before the fact was recorded was proved in fp32.
    assert parameters(Serving(), {}) == {"INFERENCE_PRECISION_HINT": "f32", "NUM_STREAMS": "1"}
