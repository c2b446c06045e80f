"""The spec's `engine:` key: what each target takes, by line."""

from __future__ import annotations

import pytest

from compiler.engine_options import ENGINE_KEYS, EngineOptions
from compiler.errors import SpecError
from tests.compiler.tensorrt_models import CNN_SPEC, spec_from
from tests.serving import ROOT

TENSORRT = CNN_SPEC.replace("tensorrt-rtx", "tensorrt")


def test_defaults(tmp_path):
    # 7.5 has no bf16 and must be asked for; fp32 means fp32, so TF32 is off.
    assert spec_from(tmp_path, CNN_SPEC).engine == EngineOptions(
        compute_capabilities=("8.0", "8.6", "8.9", "12.0", "12.1"), tf32=False
    )
    assert spec_from(tmp_path, TENSORRT).engine == EngineOptions()


def test_every_option_of_tensorrt_rtx(tmp_path):
    options = "engine: {compute_capabilities: [8.9, '8.6', 12.0], workspace: 1.5GiB, refit: true, tf32: true, "
    spec = spec_from(tmp_path, CNN_SPEC + options + "builder_optimization_level: 0}\n")
    assert spec.engine == EngineOptions(
        builder_optimization_level=0,
        compute_capabilities=("8.6", "8.9", "12.0"),
        refit=True,
        tf32=True,
        workspace_bytes=1610612736,
    )
    assert sorted(spec.engine.to_json("tensorrt-rtx")) == [
        "builder_optimization_level",
        "compute_capabilities",
        "refit",
        "tf32",
        "workspace_bytes",
    ]


def test_every_option_of_tensorrt(tmp_path):
    options = "engine: {timing_cache: cache.bin, version_compatible: true, hardware_compatibility: ampere_plus}\n"
    spec = spec_from(tmp_path, TENSORRT + options)
    assert spec.engine == EngineOptions(
        timing_cache="cache.bin", version_compatible=True, hardware_compatibility="ampere_plus"
    )
    assert "compute_capabilities" not in spec.engine.to_json("tensorrt")


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ("{builder_optimization_level: 6}", "engine.builder_optimization_level is 6; allowed: 0 to 5"),
        ("{compute_capabilities: [8.7]}", "an entry of engine.compute_capabilities is 8.7 .*; allowed: 7.5, 8.0, 8.6"),
        ("{compute_capabilities: [9.0]}", "is 9.0.*; allowed: 7.5, 8.0, 8.6, 8.9, 12.0, 12.1"),
        ("{compute_capabilities: [sm89]}", "is sm89.*; allowed"),
        ("{compute_capabilities: [true]}", "is True.*; allowed"),
        ("{compute_capabilities: [8.6, 8.6]}", "engine.compute_capabilities has 8.6 twice"),
        ("{compute_capabilities: []}", "engine.compute_capabilities is empty; allowed: 7.5"),
        ("{compute_capabilities: 8.6}", "engine.compute_capabilities must be a list, not 8.6"),
        ("{workspace: 4}", "engine.workspace is 4; allowed: a size with its unit, such as 512MiB or 4GiB"),
        ("{workspace: 4GB}", "engine.workspace is '4GB'; allowed: a size with its unit"),
        ("{workspace: 1KiB}", "engine.workspace is 1KiB; allowed: 1MiB to 1024GiB"),
        ("{refit: 1}", "engine.refit must be true or false, not 1"),
        ("{refits: true}", r"unknown key 'refits' in engine \(did you mean 'refit'\?\); allowed: builder_opt"),
        (
            "{timing_cache: a.bin}",
            r"engine.timing_cache has no meaning for the target 'tensorrt-rtx' \(only for tensorrt\); allowed: builder",
        ),
        ("{hardware_compatibility: none}", r"engine.hardware_compatibility has no meaning .*\(only for tensorrt\)"),
        ("{version_compatible: true}", r"engine.version_compatible has no meaning .*\(only for tensorrt\)"),
        ("[refit]", "engine must be a mapping, not a list"),
    ],
)
def test_a_wrong_option_is_refused_by_line(tmp_path, engine, message):
    with pytest.raises(SpecError, match=rf"spec.yaml:10: .*{message}"):
        spec_from(tmp_path, CNN_SPEC + f"engine: {engine}\n")


@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ("{compute_capabilities: [8.6]}", r"no meaning for the target 'tensorrt' \(only for tensorrt-rtx\)"),
        (
            "{hardware_compatibility: ampere}",
            r"engine.hardware_compatibility is 'ampere' \(did you mean 'ampere_plus'\?\); allowed: ampere_plus, none, "
            "same_compute_capability",
        ),
        ("{timing_cache: ../a}", "engine.timing_cache is '../a'; allowed: a relative path below the spec's folder"),
        ("{timing_cache: /etc/a}", "engine.timing_cache is '/etc/a'; allowed: a relative path below the spec's folder"),
        ("{timing_cache: 3}", "engine.timing_cache must be a non-empty string, not 3"),
    ],
)
def test_a_wrong_option_of_tensorrt_is_refused_by_line(tmp_path, engine, message):
    with pytest.raises(SpecError, match=rf"spec.yaml:10: .*{message}"):
        spec_from(tmp_path, TENSORRT + f"engine: {engine}\n")


def test_the_readme_names_every_key_and_its_example_is_read(tmp_path):
    readme = (ROOT / "README.md").read_text()
    table = readme.split("## All the spec's keys")[1].split("\n## ")[0]
    assert not [key for keys in ENGINE_KEYS.values() for key in keys if f"`{key}`" not in table]
    example = readme.split("## TensorRT\n\n```yaml\n")[1].split("```")[0]
    spec = spec_from(tmp_path, CNN_SPEC.replace("target: tensorrt-rtx\n", "") + example)
    assert (spec.target, spec.engine.compute_capabilities) == ("tensorrt-rtx", ("8.6", "8.9"))


def test_a_target_without_an_engine_takes_no_engine(tmp_path):
    text = CNN_SPEC.replace("tensorrt-rtx", "onnxruntime") + "engine: {refit: true}\n"
    with pytest.raises(SpecError, match=r":10: engine has no meaning for the target 'onnxruntime'; targets that .*rtx"):
        spec_from(tmp_path, text)
