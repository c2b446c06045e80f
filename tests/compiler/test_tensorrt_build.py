"""`compile build` and `compile check` for the TensorRT targets, from the spec to the repository, without a GPU."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from compiler.addresses import ServerOptions
from compiler.check import check_repository
from compiler.engine_host import EngineHost, Gpu, host_gpus
from compiler.errors import ModelkilnError
from compiler.pipeline import compile_model
from compiler.repository import Repository
from compiler.server import TritonServer
from compiler.spec import model_spec_from_file
from compiler.triton_config import config_from_text
from tests.compiler.conftest import SPEC
from tests.serving import ROOT, run_compile

pytestmark = pytest.mark.usefixtures("exporter_library")  # once for all exports of this module

trt = pytest.importorskip("tensorrt_rtx", reason="pip install 'modelkiln[rtx]'")
NO_GPU = pytest.mark.skipif(bool(host_gpus()), reason="this machine has a GPU: tests/gpu/run.sh covers it")

MODEL = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(16, 3)
    def forward(self, x):
        return torch.tanh(self.layer(x))
build = Model
"""
RTX = SPEC + "target: tensorrt-rtx\nengine: {compute_capabilities: [8.6]}\nserving: {instances: 2, threads: 4}\n"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which a small model was built for tensorrt-rtx by the command; a build takes seconds."""
    folder = tmp_path_factory.mktemp("rtx")
    (folder / "rtx_model.py").write_text("import torch\nfrom torch import nn\n" + MODEL)
    (folder / "spec.yaml").write_text(RTX.replace("FACTORY", "rtx_model:build").lstrip())
    done = run_compile("build", folder / "spec.yaml", "-r", folder / "repo")
    assert done.returncode == 0, done.stderr
    (folder / "stderr").write_text(done.stderr)
    return folder


def _manifest(built: Path) -> dict:
    return json.loads((built / "repo" / "small" / "1" / "manifest.json").read_text())


@NO_GPU
def test_what_was_not_run_is_said_in_the_output_and_in_the_manifest(built):
    assert "model.plan itself was NOT run: this machine cannot. Parity is judged on source.onnx" in (
        " ".join((built / "stderr").read_text().split())
    )
    parity = _manifest(built)["parity"]
    assert (parity["judged_on"], parity["artifact_was_run"]) == ("source.onnx", False)
    assert parity["num_cases"] >= 6 and parity["max_abs"] < 1e-5


def test_the_manifest_holds_what_the_engine_was_made_of(built):
    manifest = _manifest(built)
    assert (manifest["target"], manifest["backend"], manifest["precision"]) == ("tensorrt-rtx", "tensorrt_rtx", "fp32")
    assert sorted(manifest["files"]) == ["model.plan", "reference.npz", "source.onnx"]
    facts = manifest["artifact"]
    assert facts["compute_capabilities"] == ["8.6"] and facts["library_version"] == trt.__version__
    assert facts["profile"] == {"x": {"min": [1, 16], "opt": [4, 16], "max": [8, 16]}}
    assert facts["built_from"] == {"file": "source.onnx", "sha256": manifest["files"]["source.onnx"]["sha256"]}
    assert facts["bytes"] == manifest["files"]["model.plan"]["bytes"] > 0
    # c14: a new version of the library is another build.
    assert manifest["made_from"]["packages"]["tensorrt-rtx-cu12"] == trt.__version__
    assert [p["name"] for p in manifest["passes"]] == [
        "strip_metadata",
        "fold_constants",
        "cancel_casts",
        "deduplicate",
        "prune_inputs",
    ]


def test_the_config_asks_for_a_gpu_and_the_engines_own_backend(built):
    config = config_from_text((built / "repo" / "small" / "config.pbtxt").read_text(), "config.pbtxt")
    assert (config.backend, config.max_batch_size) == ("tensorrt_rtx", 8)
    assert [(g.count, g.kind) for g in config.instance_group] == [(2, config.instance_group[0].KIND_GPU)]
    assert not config.parameters  # threads are a matter of the CPU


def test_the_published_source_answers_as_the_model(built):
    import torch

    session = onnxruntime.InferenceSession(str(built / "repo" / "small" / "1" / "source.onnx"))
    x = np.random.default_rng(0).standard_normal((5, 16)).astype(np.float32)
    torch.manual_seed(0)
    want = torch.tanh(torch.nn.Linear(16, 3)(torch.from_numpy(x))).detach().numpy()
    assert np.allclose(session.run(None, {"x": x})[0], want, atol=1e-6)


def test_nothing_to_do_the_second_time(built):
    done = run_compile("build", built / "spec.yaml", "-r", built / "repo", "--json")
    assert json.loads(done.stdout)["models"][0]["built"] is False


def _messages(built: Path, host: EngineHost) -> list[str]:
    return [f.message for f in check_repository(Repository(built / "repo"), host=host)]


@NO_GPU
def test_check_and_serve_refuse_an_engine_on_a_machine_without_a_gpu(built):
    for command in ("check", "serve"):
        done = run_compile(command, built / "repo")
        assert done.returncode == 1
        assert (
            "small: is a tensorrt-rtx engine for compute capability 8.6, and this machine has no NVIDIA GPU; build it "
            "with target: onnxruntime to serve it here"
        ) in done.stdout + done.stderr


def test_c14_check_compares_the_manifest_with_the_host(built):
    a10, t4 = Gpu("NVIDIA A10", "8.6"), Gpu("Tesla T4", "7.5")
    assert _messages(built, EngineHost((a10,), {"tensorrt-rtx": trt.__version__})) == []
    assert _messages(built, EngineHost((t4,), {"tensorrt-rtx": "1.6.0"})) == [
        "the engine was built for compute capability 8.6, and this machine's Tesla T4 has 7.5; "
        "build it again on this machine",
        f"the engine was built with tensorrt-rtx {trt.__version__}, and this machine has 1.6.0; "
        "build it again with that version",
    ]


def test_c10_check_compares_the_config_with_the_profile(built, tmp_path):
    shutil.copytree(built / "repo", tmp_path / "repo")
    config = tmp_path / "repo" / "small" / "config.pbtxt"
    config.write_text(config.read_text().replace("max_batch_size: 8", "max_batch_size: 64"))
    host = EngineHost((Gpu("NVIDIA A10", "8.6"),), {"tensorrt-rtx": trt.__version__})
    assert _messages(tmp_path, host) == ["max_batch_size is 64, and the engine's profile for 'x' ends at batch 8"]


def test_an_engine_without_a_manifest_is_not_compared_but_needs_a_gpu(tmp_path):
    model = tmp_path / "repo" / "theirs" / "1"
    model.mkdir(parents=True)
    (model / "model.plan").write_bytes(b"plan")
    (model.parent / "config.pbtxt").write_text('backend: "tensorrt"\nmax_batch_size: 4\n')
    assert _messages(tmp_path, EngineHost((Gpu("NVIDIA A10", "8.6"),), {"tensorrt": "11.4.0"})) == []
    assert "is a tensorrt engine for compute capability unknown" in _messages(tmp_path, EngineHost())[0]
    (model / "model.plan").unlink()
    assert "version 1 has no model.plan" in _messages(tmp_path, EngineHost((Gpu("NVIDIA A10", "8.6"),)))


def test_the_engine_is_judged_where_it_can_run(project, monkeypatch):
    """Where `open` gives a runner, that is what parity is judged on: a wrong answer of it is refused."""
    import dataclasses

    from compiler.errors import ModelRefused
    from compiler.targets import tensorrt_rtx as target

    def broken(folder: Path, threads: int, facts: dict):
        return lambda inputs: {"y": np.zeros((inputs["x"].shape[0], 3), np.float32)}

    path = project(MODEL, RTX)
    monkeypatch.setattr(target, "TARGET", dataclasses.replace(target.TARGET, open=broken))
    with pytest.raises(ModelRefused, match="does not answer as the model does"):
        compile_model(model_spec_from_file(path), Repository(path.parent / "repo"))


@NO_GPU
def test_the_backend_is_found_and_says_what_it_lacks(built, tmp_path):
    """On a real tritonserver: our backend is loaded with both its libraries, and fails the load with the reason."""
    shutil.copytree(built / "repo", tmp_path / "repo")
    config = tmp_path / "repo" / "small" / "config.pbtxt"
    config.write_text(config.read_text().replace("KIND_GPU", "KIND_CPU"))
    options = ServerOptions(tmp_path / "repo", http_port=0, grpc_port=0, metrics_port=0)
    with pytest.raises(ModelkilnError, match="tensorrt_rtx needs an NVIDIA GPU and a torch with CUDA"):
        TritonServer(options).__enter__()


def test_c14_another_gpu_is_another_build(monkeypatch):
    from compiler.targets import tensorrt_library as library

    monkeypatch.setattr(library, "host_gpus", lambda: (Gpu("NVIDIA A10", "8.6"), Gpu("NVIDIA A10", "8.6")))
    assert library.machine_facts(library.TENSORRT) == {"compute_capabilities": ["8.6"]}
    assert library.machine_facts(library.TENSORRT_RTX) == {}


@NO_GPU
def test_tensorrt_itself_is_refused_early_with_what_to_use(project):
    """Exit code 3, before the model's module is imported: it is not even there."""
    path = project("raise SystemError('imported')\n", SPEC + "target: tensorrt\n")
    done = run_compile("build", path, "-r", path.parent / "repo")
    assert done.returncode == 3 and not (path.parent / "repo").exists()
    # Without the package the message is about that; with it, about the GPU.
    assert "pip install 'modelkiln[gpu]'" in done.stderr or "use target: tensorrt-rtx" in done.stderr


def test_an_absent_package_gives_the_install_command(project):
    path = project(MODEL, RTX)
    code = (
        "import sys; sys.modules['tensorrt_rtx'] = None; from compiler.cli import main; "
        f"main(['build', {str(path)!r}, '-r', {str(path.parent / 'repo')!r}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 3
    assert "the target 'tensorrt-rtx' needs the Python package 'tensorrt_rtx', which is not installed" in done.stderr
    assert "hint: pip install 'modelkiln[rtx]'" in done.stderr


@pytest.mark.parametrize("version", ["10.12.0", "12.0.0", "8.6.1"])
def test_versions_with_another_api_are_refused(version):
    from compiler.errors import EnvironmentLacks
    from compiler.targets.tensorrt_library import TENSORRT, check_version

    for good in ("10.13.0.35", "10.16.1.11", "11.4.0.106"):
        check_version(TENSORRT, good)
    with pytest.raises(EnvironmentLacks, match=f"tensorrt is {version}; supported: from 10.13 on, below 12"):
        check_version(TENSORRT, version)


def test_doctor_tells_what_each_lack_prevents():
    done = run_compile("doctor", "--json")
    checks = {c["name"]: c for c in json.loads(done.stdout)["checks"]}
    assert checks["tensorrt-rtx"]["status"] == "ok" and checks["tensorrt-rtx"]["found"] == trt.__version__
    if not host_gpus():
        assert "running any engine" in checks["gpu"]["prevents"]


@pytest.mark.slow
def test_minilm_is_built_by_the_command(tmp_path):
    """A real sentence encoder with weights, two dynamic dims and masks."""
    text = (ROOT / "ensembles/text_embedding/encoder.yaml").read_text()
    # A narrower range of lengths keeps the reference's minutes down; the graph is the same.
    text = text.replace("target: onnxruntime", "target: tensorrt-rtx").replace("opt: 64, max: 256", "opt: 16, max: 32")
    (tmp_path / "encoder.yaml").write_text(text)
    shutil.copy(ROOT / "ensembles/text_embedding/calibration_sentences.json", tmp_path)
    done = run_compile("build", tmp_path / "encoder.yaml", "-r", tmp_path / "repo", "--json")
    assert done.returncode == 0, done.stderr
    manifest = json.loads(done.stdout)["models"][0]["manifest"]
    facts = manifest["artifact"]
    shapes = {"min": [1, 1], "opt": [8, 16], "max": [32, 32]}
    assert facts["profile"] == {"input_ids": shapes, "attention_mask": shapes}
    assert facts["bytes"] > 80_000_000 and facts["layers_by_precision"]["fp32"] > 100
    # a15: the mask's slices end at the largest int64; kept, and no note for a person to read.
    assert {f["held_as"] for f in facts["int64_constants"]} == {"int64"} and len(facts["notes"]) == 1
    assert manifest["parity"]["worst_cosine"] > 0.999999
