from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from compiler.candidate_report import table
from compiler.candidates import Candidate, choose
from compiler.errors import ModelRefused
from compiler.optimise import Choice, PassReport, refuse_missing_fusions
from compiler.spec import Tolerance
from compiler.verify import ParityReport
from tests.compiler.conftest import SPEC
from tests.compiler.test_cli import MODEL
from tests.serving import run_compile

pytestmark = pytest.mark.usefixtures("exporter_library")  # once for all exports of this module

PARITY = ParityReport((), Tolerance(None, 0, 0))


@pytest.fixture
def candidate(tmp_path):
    def make(target: str, latency_ms: float | None, refused: str = "") -> Candidate:
        (tmp_path / target).mkdir()
        (tmp_path / target / "model").write_bytes(b"x" * 2_500_000)
        return Candidate(
            Choice(target, "fp32"), tmp_path / target, (), {}, PARITY, refused, "model", latency_ms=latency_ms
        )

    return make


def test_the_fastest_proved_candidate_is_chosen(candidate):
    slow, fast, wrong = candidate("a", 9.0), candidate("b", 5.0), candidate("c", None, "off by 0.3")
    assert choose([slow, fast, wrong]) is fast
    assert table([slow, fast, wrong], fast) == [
        "candidate                       ms    cosine        MB",
        "b fp32                        5.00  1.000000       2.5  shipped",
        "a fp32                        9.00  1.000000       2.5",
        "c fp32                           -  1.000000       2.5  off by 0.3",
    ]


def test_where_none_is_proved_each_reason_is_told(candidate):
    with pytest.raises(ModelRefused) as error:
        choose([candidate("a", None, "NaN\n  hint: x"), candidate("b", None, "off")])
    assert str(error.value) == "none of 2 candidates can be shipped:\n  a fp32: NaN\n  hint: x\n  b fp32: off"


def test_one_candidate_is_refused_with_its_own_hint(candidate):
    with pytest.raises(ModelRefused) as error:
        choose([candidate("a", None, "NaN\n  hint: narrow it")])
    assert (error.value.message, error.value.hint) == ("NaN", "narrow it")


REPORT = PassReport("fuse", {"attention": 5, "gelu": 0}, 9, 4, ("a Softmax was found",), "")


def test_a17_a_fusion_that_finds_less_than_required_is_refused():
    refuse_missing_fusions([REPORT], {"attention": 5})
    with pytest.raises(ModelRefused, match=r"fusion 'attention' was found 5 times, 6 are required \(a Softmax was"):
        refuse_missing_fusions([REPORT], {"attention": 6})
    with pytest.raises(ModelRefused, match=r"'atention' is required.*\(did you mean 'attention'\?\)"):
        refuse_missing_fusions([REPORT], {"atention": 1})


def test_a_dropped_pass_does_not_count_as_a_fusion():
    from dataclasses import replace

    with pytest.raises(ModelRefused):
        refuse_missing_fusions([replace(REPORT, dropped="off by 1")], {"attention": 1})


def _auto(tmp_path: Path, *flags: str):
    (tmp_path / "auto_model.py").write_text("import torch\nfrom torch import nn\n" + MODEL)
    (tmp_path / "spec.yaml").write_text(SPEC.replace("FACTORY", "auto_model:build").lstrip())
    return run_compile("build", tmp_path / "spec.yaml", "-r", tmp_path / "repo", "--json", *flags)


def test_auto_builds_all_targets_ships_the_fastest_and_tells_all(tmp_path):
    done = _auto(tmp_path, "--target", "auto")
    assert done.returncode == 0, done.stderr
    manifest = json.loads(done.stdout)["models"][0]["manifest"]
    timed = {c["target"]: c["latency_ms"] for c in manifest["candidates"]}
    assert set(timed) == {"onnxruntime", "openvino"} and all(timed.values())
    assert manifest["target"] == min(timed, key=lambda name: timed[name])
    assert manifest["spec"]["target"] == "auto" and "cores" in manifest["made_from"]["processor"]
    assert "compare the candidates" in done.stderr and "shipped" in done.stderr
    assert json.loads(_auto(tmp_path, "--target", "auto").stdout)["models"][0]["built"] is False
    assert json.loads(_auto(tmp_path).stdout)["models"][0]["version"] == 2  # the spec's own target is another build


def test_a_wrong_target_on_the_command_line(tmp_path):
    done = _auto(tmp_path, "--target", "onnx")
    assert done.returncode == 2 and "command line:1: target is 'onnx'" in done.stderr


def test_a17_require_fusion_on_the_command_line(tmp_path):
    done = _auto(tmp_path, "--require-fusion", "attention=1")
    assert done.returncode == 1 and "fusion 'attention' was found 0 times, 1 are required" in done.stderr
    assert not (tmp_path / "repo").exists()
    assert _auto(tmp_path, "--require-fusion", "attention").returncode == 2


def test_b12_bf16_on_onnxruntime_is_refused_before_any_work(tmp_path):
    done = _auto(tmp_path, "--precision", "bf16")
    assert done.returncode == 1 and not (tmp_path / "repo").exists()
    assert "ONNX Runtime's CPU provider has no bfloat16 kernels" in done.stderr and "[1/" not in done.stderr


def test_int8_needs_calibration_data(tmp_path):
    done = _auto(tmp_path, "--precision", "int8")
    assert done.returncode == 2 and "precision int8 needs the key 'calibration'" in done.stderr


def test_int8_is_built_from_calibration_data_and_told_in_the_manifest(tmp_path):
    (tmp_path / "data").mkdir()
    rng = np.random.default_rng(0)
    for index in range(4):
        np.savez(tmp_path / "data" / f"{index}.npz", x=rng.uniform(-4, 4, (8, 16)).astype(np.float32))
    (tmp_path / "auto_model.py").write_text("import torch\nfrom torch import nn\n" + MODEL)
    spec = SPEC.replace("FACTORY", "auto_model:build").lstrip() + "precision: int8\ncalibration: data\n"
    (tmp_path / "spec.yaml").write_text(spec)
    command = ("build", tmp_path / "spec.yaml", "-r", tmp_path / "repo", "--json")
    done = run_compile(*command)
    assert done.returncode == 0, done.stderr
    manifest = json.loads(done.stdout)["models"][0]["manifest"]
    assert manifest["precision"] == "int8" and manifest["parity"]["worst_cosine"] >= 0.99
    assert "QuantizeLinear" in manifest["graph"]["shipped"]["ops"]
    # What merging takes away is no longer there to be judged product by product.
    assert [p["name"] for p in manifest["passes"]][-2:] == ["convert_to_int8", "merge_products"]
    # Other calibration data is another build.
    assert json.loads(run_compile(*command).stdout)["models"][0]["built"] is False
    np.savez(tmp_path / "data" / "0.npz", x=np.zeros((8, 16), dtype=np.float32))
    assert json.loads(run_compile(*command).stdout)["models"][0]["version"] == 2


def test_int8_that_fails_parity_is_made_again_with_less_loss_to_spend(tmp_path, monkeypatch):
    """The engine may lose more than the search saw: the second graph must keep half of the allowance, not all."""
    from dataclasses import replace

    from compiler import candidates, optimise
    from compiler.pipeline import compile_model
    from compiler.repository import Repository
    from compiler.spec import model_spec_from_file

    (tmp_path / "data").mkdir()
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "data" / "0.npz", x=rng.uniform(-4, 4, (8, 16)).astype(np.float32))
    (tmp_path / "again_model.py").write_text("import torch\nfrom torch import nn\n" + MODEL)
    spec = (
        SPEC.replace("FACTORY", "again_model:build").lstrip() + "target: openvino\nprecision: int8\ncalibration: data\n"
    )
    (tmp_path / "spec.yaml").write_text(spec)
    asked, judged = [], []
    convert, verify = optimise.convert, candidates.verify

    def converting(*args, calibration, **kwargs):
        asked.append(calibration.min_cosine)
        return convert(*args, calibration=calibration, **kwargs)

    def strict_at_first(run, cases, references, tolerance, *rest):
        if len(cases) > 1:  # the shipped file, not a pass
            judged.append(tolerance.cosine)
            tolerance = replace(tolerance, cosine=1.0) if len(judged) == 1 else tolerance
        return verify(run, cases, references, tolerance, *rest)

    monkeypatch.setattr(optimise, "convert", converting)
    monkeypatch.setattr(candidates, "verify", strict_at_first)
    published = compile_model(model_spec_from_file(tmp_path / "spec.yaml"), Repository(tmp_path / "repo")).published
    assert asked == pytest.approx([0.99, 0.995]) and len(judged) == 2
    assert published.manifest["parity"]["tolerance"]["cosine"] == 0.99  # what is shipped is judged as before
    assert (published.folder / "model.xml").is_file()
