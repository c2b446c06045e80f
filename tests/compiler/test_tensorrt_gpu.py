"""What only a machine with an NVIDIA GPU can show: engines that are loaded, run, inspected and served."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from compiler.engine_host import host_gpus
from compiler.engine_options import RTX_COMPUTE_CAPABILITIES
from compiler.manifest import BuildResult
from compiler.pipeline import compile_model
from compiler.repository import Repository
from compiler.spec import model_spec_from_file
from tests.compiler.conftest import SPEC
from tests.compiler.test_tensorrt_build import MODEL
from tests.serving import run_compile, serve

GPUS = host_gpus()
CAPABILITY = GPUS[0].compute_capability if GPUS else ""
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not GPUS, reason="no NVIDIA GPU: run tests/gpu/run.sh on one")]


def _need(target: str) -> None:
    if importlib.util.find_spec(target.replace("-", "_")) is None:
        pytest.skip(f"{target} is not installed")
    if target == "tensorrt-rtx" and CAPABILITY not in RTX_COMPUTE_CAPABILITIES:
        pytest.skip(f"TensorRT-RTX has no engines for compute capability {CAPABILITY}")


def _spec(target: str, options: str = "") -> str:
    capabilities = f"compute_capabilities: [{CAPABILITY}]" if target == "tensorrt-rtx" else ""
    inside = ", ".join(filter(None, (capabilities, options)))
    return f"{SPEC}target: {target}\nengine: {{{inside}}}\n"


def _build(path: Path) -> BuildResult:
    return compile_model(model_spec_from_file(path), Repository(path.parent / "repo"))


@pytest.mark.parametrize("target", ["tensorrt", "tensorrt-rtx"])
def test_parity_is_judged_on_the_engine_itself(project, target):
    _need(target)
    manifest = _build(project(MODEL, _spec(target))).published.manifest
    assert (manifest["parity"]["judged_on"], manifest["parity"]["artifact_was_run"]) == ("model.plan", True)
    assert manifest["artifact"]["compute_capabilities"] == [CAPABILITY]


def test_b20_layers_are_read_from_the_inspector(project):
    _need("tensorrt")
    facts = _build(project(MODEL, _spec("tensorrt"))).published.manifest["artifact"]
    assert facts["precision_read_from"] == "engine inspector" and facts["layers_by_precision"].get("fp32", 0) > 0


def test_tf32_is_off_unless_asked_for(project):
    """With it on, products of 16 random terms are off by about 1e-3 of their size."""
    _need("tensorrt")
    parity = _build(project(MODEL, _spec("tensorrt"))).published.manifest["parity"]
    assert parity["max_abs"] < 1e-5


@pytest.mark.parametrize(
    "options",
    ["refit: true", "hardware_compatibility: ampere_plus", "builder_optimization_level: 5", "workspace: 64MiB"],
)
def test_every_option_builds_and_answers(project, options):
    _need("tensorrt")
    key = options.split(":")[0].replace("workspace", "workspace_bytes")
    assert _build(project(MODEL, _spec("tensorrt", options))).published.manifest["artifact"]["builder"][key]


def test_the_timing_cache_is_written_and_read(project):
    _need("tensorrt")
    path = project(MODEL, _spec("tensorrt", "timing_cache: timing.cache"))
    _build(path)
    assert (path.parent / "timing.cache").stat().st_size > 0
    again = compile_model(model_spec_from_file(path), Repository(path.parent / "repo"), force=True)
    assert again.published.version == 2


def test_a_tensorrt_rtx_engine_is_served_by_our_backend(project):
    _need("tensorrt-rtx")
    from clients.grpc import GrpcClient

    path = project(MODEL, _spec("tensorrt-rtx"))
    _build(path)
    x = np.random.default_rng(0).standard_normal((5, 16)).astype(np.float32)
    with serve(path.parent / "repo") as server, GrpcClient(server.grpc) as client:
        got = client.infer("small", {"x": x})["y"]
    import torch

    torch.manual_seed(0)
    want = torch.tanh(torch.nn.Linear(16, 3)(torch.from_numpy(x))).detach().numpy()
    assert np.allclose(got, want, atol=1e-5)


def test_check_takes_what_this_machine_built(project):
    _need("tensorrt")
    path = project(MODEL, _spec("tensorrt"))
    _build(path)
    done = run_compile("check", path.parent / "repo", "--json")
    assert json.loads(done.stdout)["findings"] == []
