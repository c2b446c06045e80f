"""Precisions through the whole pipeline: what a build says of them, and what it ships."""

from __future__ import annotations

import re

import pytest

from compiler.pipeline import compile_model
from compiler.repository import Repository
from compiler.spec import model_spec_from_file
from tests.compiler.conftest import SPEC

pytestmark = []  # off  # once for all exports of this module

MODEL = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(16, 64), nn.Linear(64, 16), nn.LayerNorm(16)

    def forward(self, x):
        return self.norm(x + self.down(torch.relu(self.up(x))))

def build():
    torch.manual_seed(0)
    return Model()
"""


@pytest.mark.parametrize("target", ["onnxruntime", "openvino"])
def test_b11_fp16_on_a_cpu_warns_with_the_ratio_measured_in_this_build(project, tmp_path, target):
    pytest.importorskip(target)
    spec = model_spec_from_file(project(MODEL, SPEC + f"target: {target}\nprecision: fp16\n"))
    manifest = compile_model(spec, Repository(tmp_path / "repo")).published.manifest
    [note] = [n for n in manifest["artifact"]["notes"] if "Half precision pays on a GPU" in n]
    found = re.match(
        r"fp16 is (slower than|faster than|as fast as) fp32 on this CPU: (\S+) times its latency at the opt sizes "
        r"\((\S+) against (\S+) ms, half of the rounds within (\S+) to (\S+)\)",
        note,
    )
    assert found, note
    ratio, half_ms, single_ms, low, high = map(float, found.groups()[1:])
    # The figures belong together, and the verdict follows from the quartiles.
    assert 0 < low <= ratio <= high and half_ms > 0 and single_ms > 0
    if high < 0.99 or low > 1.01:
        assert found[1] == ("faster than" if high < 1 else "slower than")


def test_b11_the_default_on_a_cpu_is_fp32_and_auto_does_not_try_half(project):
    from compiler.candidates import choices_for

    path = project(MODEL, SPEC)
    assert model_spec_from_file(path).precision == "fp32"
    path.write_text(path.read_text() + "target: onnxruntime\nprecision: auto\n")
    assert {c.precision for c in choices_for(model_spec_from_file(path))} == {"fp32", "int8_dynamic"}
