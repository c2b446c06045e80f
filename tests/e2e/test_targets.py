"""Each target's file, served on the real server by its backend, against the eager model."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from clients.errors import ServerError
from clients.grpc import GrpcClient
from compiler.precision.support import computes_bf16
from compiler.targets.openvino import HINT, open_model
from tests.serving import run_compile, serve

MODEL = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.norm = nn.Embedding(50, 32), nn.LayerNorm(32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 5)

    def forward(self, ids, scale):
        x = self.norm(self.table(ids))
        logits = self.down(nn.functional.gelu(self.up(x))).mean(1) * scale
        return {"logits": logits, "best": logits.argmax(-1, keepdim=True), "ids_out": ids + 1}
"""
SPEC = """
name: on_{target}
source: {{factory: "target_model:Model"}}
target: {target}
dims:
  batch: {{max: 8}}
  length: {{max: 12}}
inputs:
  - {{name: ids, dtype: int64, shape: [batch, length], range: [0, 49]}}
  - {{name: scale, dtype: float32, shape: [batch, 1], range: [0.5, 2]}}
outputs:
  - {{name: logits}}
  - {{name: best}}
  - {{name: ids_out}}
serving: {{threads: 1}}
"""
TARGETS = ("onnxruntime", "openvino")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("targets")
    (path / "target_model.py").write_text(MODEL)
    for target in TARGETS:
        (path / f"{target}.yaml").write_text(SPEC.format(target=target))
    if computes_bf16():
        spec = SPEC.replace("on_{target}", "in_bf16").format(target="openvino")
        # The logits are a mean over few values: their worst row is judged more loosely than the default.
        (path / "bf16.yaml").write_text(
            spec.replace("  - {name: best}\n", "") + "precision: bf16\ntolerance: {cosine: 0.99}\n"
        )
    done = run_compile("build", path, "-r", path / "repo")
    assert done.returncode == 0, done.stderr
    return path


@pytest.fixture(scope="module")
def client(folder):
    with serve(folder / "repo") as server, GrpcClient(server.grpc) as client:
        yield client


def _inputs(index: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(index)
    batch, length = int(rng.integers(1, 4)), int(rng.integers(1, 4))
    return {
        "ids": rng.integers(0, 50, (batch, length)),
        "scale": rng.uniform(0.5, 2, (batch, 1)).astype(np.float32),
    }


@pytest.fixture(scope="module")
def eager(folder):
    import torch

    namespace: dict = {}
    exec(MODEL, namespace)
    module = namespace["Model"]().eval()

    def run(inputs):
        with torch.inference_mode():
            return {k: v.numpy() for k, v in module(**{k: torch.from_numpy(v) for k, v in inputs.items()}).items()}

    return run


@pytest.mark.parametrize("target", TARGETS)
def test_answers_are_the_models_under_load(client, eager, target):
    """Requests of many shapes at once: the backend merges equal ones and takes the rest apart."""
    cases = [_inputs(i) for i in range(60)]
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda inputs: client.infer(f"on_{target}", inputs), cases))
    for inputs, got in zip(cases, answers, strict=True):
        want = eager(inputs)
        assert set(got) == {"logits", "best", "ids_out"}
        assert np.abs(got["logits"] - want["logits"]).max() < 1e-5
        assert np.array_equal(got["best"], want["best"])
        assert got["ids_out"].dtype == np.int64 and np.array_equal(got["ids_out"], want["ids_out"])


@pytest.mark.parametrize("target", TARGETS)
def test_one_output_can_be_asked_for(client, eager, target):
    inputs = _inputs(1)
    got = client.infer(f"on_{target}", inputs, outputs=["best"])
    assert list(got) == ["best"] and np.array_equal(got["best"], eager(inputs)["best"])


@pytest.mark.parametrize("target", TARGETS)
def test_answers_do_not_share_a_buffer(client, eager, target):
    """An answer that is still held must not change when the next one is computed (d11)."""
    first, second = _inputs(2), _inputs(3)
    held = client.infer(f"on_{target}", first)["logits"]
    client.infer(f"on_{target}", second)
    assert np.abs(held - eager(first)["logits"]).max() < 1e-5


def test_a_bad_id_is_an_error_of_its_own(client):
    bad = {"ids": np.array([[1000]]), "scale": np.ones((1, 1), dtype=np.float32)}
    with pytest.raises(ServerError, match="out of data bounds"):
        client.infer("on_onnxruntime", bad)


def test_a15_int64_beyond_int32_is_refused_where_the_target_clamps_it(folder, tmp_path):
    """OpenVINO's CPU plugin computes int64 in 32 bits; ONNX Runtime does not."""
    (tmp_path / "target_model.py").write_text(MODEL.replace("ids + 1}", "ids + 2**40}"))
    for target, code in (("onnxruntime", 0), ("openvino", 1)):
        (tmp_path / f"{target}.yaml").write_text(SPEC.format(target=target))
        done = run_compile("build", tmp_path / f"{target}.yaml", "-r", tmp_path / "repo")
        assert done.returncode == code, done.stderr
    assert "output 'ids_out': 100.00% of the elements differ" in done.stderr
    assert "OpenVINO's CPU plugin computes 64-bit integers in 32 bits" in done.stderr
    assert not (tmp_path / "repo" / "on_openvino").exists()


def test_openvino_says_that_it_computes_in_fp32(folder):
    text = (folder / "repo" / "on_openvino" / "config.pbtxt").read_text()
    assert 'key: "INFERENCE_PRECISION_HINT"' in text and 'string_value: "f32"' in text


@pytest.mark.skipif(not computes_bf16(), reason="this CPU has no bf16 instructions")
def test_bf16_is_served_exactly_as_it_was_proved(client, eager, folder):
    proved = open_model(folder / "repo" / "in_bf16" / "1", 1, {HINT: "bf16"})
    for index in range(5):
        inputs = _inputs(index)
        got, want = client.infer("in_bf16", inputs)["logits"], proved(inputs)["logits"]
        assert np.array_equal(got, want)
        assert np.abs(got - eager(inputs)["logits"]).max() > 1e-5  # not what fp32 gives
