"""Every call that our TensorRT code makes exists in TensorRT 10, in 11 and in TensorRT-RTX, checked without a GPU.

The list is read from our own sources, so that it cannot go stale. The `tensorrt-*-bindings` wheels hold the API without
the library: nine C functions that they link to are answered by a stub that is compiled here.
"""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.serving import ROOT

SOURCES = [*sorted((ROOT / "compiler/targets").glob("tensorrt*.py")), ROOT / "backends/tensorrt_rtx/model.py"]

# The name that our code gives to each object of the library, and its class there.
RECEIVERS = {
    "builder": "Builder",
    "network": "INetworkDefinition",
    "parser": "OnnxParser",
    "error": "ParserError",
    "config": "IBuilderConfig",
    "profile": "IOptimizationProfile",
    "cache": "ITimingCache",
    "layer": "ILayer",
    "tensor": "ITensor",
    "value": "ITensor",
    "blob": "IHostMemory",
    "runtime": "Runtime",
    "engine": "ICudaEngine",
    "context": "IExecutionContext",
    "inspector": "EngineInspector",
}
# Names of ours that look like one of those.
OURS = {("profile", "name"), ("profile", "to_json"), ("profile", "min"), ("profile", "max"), ("tensor", "onnx_type")}
OURS |= {("profile", "items"), ("value", "consumers"), ("tensor", "numpy"), ("tensor", "size"), ("layer", "get")}
MAKES_AN_OBJECT = ("create_", "deserialize_", "build_serialized_", "get_timing_", "get_layer", "get_error")
RTX_ONLY = {"ComputeCapability", "IBuilderConfig.num_compute_capabilities", "IBuilderConfig.set_compute_capability"}
PRECISION_FLAGS = {"FP16", "BF16", "INT8", "FP8", "INT4", "FP4", "OBEY_PRECISION_CONSTRAINTS"}

STUB = """
void *createInferBuilder_INTERNAL() { return 0; }
void *createInferRefitter_INTERNAL() { return 0; }
void *createInferRuntime_INTERNAL() { return 0; }
void *createNvOnnxParser_INTERNAL() { return 0; }
void *createNvOnnxParserRefitter_INTERNAL() { return 0; }
void *getBuilderPluginRegistry() { return 0; }
void *getPluginRegistry() { return 0; }
int getNvOnnxParserVersion() { return 0; }
int initLibNvInferPlugins() { return 0; }
"""
MISSING = """
import importlib, json, sys
module = importlib.import_module(sys.argv[1])
missing = []
for path in json.load(sys.stdin):
    value = module
    for part in path.split("."):
        value = getattr(value, part, None)
        if value is None:
            missing.append(path)
            break
print(json.dumps([module.__version__, missing]))
"""


def _dotted(node: ast.AST) -> list[str]:
    """Returns the names of `a.b.c`, or nothing where it is another expression."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute) and (inner := _dotted(node.value)):
        return [*inner, node.attr]
    return []


def used_api() -> set[str]:
    """Returns what our code uses, as `Class.attribute` or `Enum.MEMBER`."""
    found = set()
    for source in SOURCES:
        for node in ast.walk(ast.parse(source.read_text())):
            if not isinstance(node, ast.Attribute):
                continue
            names = _dotted(node)
            # `self.engine.x` and `parsed.builder.x` are the same objects as `engine.x` and `builder.x`.
            while len(names) > 2 and names[0] in ("self", "parsed"):
                names = names[1:]
            if names[:1] == ["trt"] and len(names) > 1:
                found.add(".".join(names[1:]))
            elif len(names) > 1 and names[0] in RECEIVERS and (names[0], names[1]) not in OURS:
                found.add(f"{RECEIVERS[names[0]]}.{names[1]}")
    return found


def _missing(module: str, names: set[str], paths: list[Path], libraries: Path | None) -> tuple[str, list[str]]:
    environment = {**os.environ, "PYTHONPATH": ":".join(map(str, paths))}
    if libraries is not None:
        environment["LD_LIBRARY_PATH"] = str(libraries)
    done = subprocess.run(
        [sys.executable, "-c", MISSING, module],
        input=json.dumps(sorted(names)),
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    version, missing = json.loads(done.stdout)
    return version, missing


def test_the_list_is_what_is_used():
    used = used_api()
    assert {
        "Builder.build_serialized_network",
        "BuilderFlag.REFIT",
        "EngineInspector.get_engine_information",
        "IBuilderConfig.clear_flag",
        "IExecutionContext.execute_async_v3",
        "INetworkDefinition.get_layer",
        "NetworkDefinitionCreationFlag.STRONGLY_TYPED",
        "ParserError.node_name",
        "ITimingCache.serialize",
        "Runtime.deserialize_cuda_engine",
    } <= used
    assert len(used) > 60


def test_every_object_of_the_library_has_a_name_in_the_table():
    """Else its calls would not be in the list."""
    seen = 0
    for source in SOURCES:
        for node in ast.walk(ast.parse(source.read_text())):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
                called, target = _dotted(node.value.func), _dotted(node.targets[0])
                made = called[:1] == ["trt"] and called[-1][:1].isupper()
                if called and target and (made or called[-1].startswith(MAKES_AN_OBJECT)):
                    assert target[-1] in RECEIVERS, f"{source.name}:{node.lineno}: {ast.unparse(node)}"
                    seen += 1
    assert seen >= 12


def test_b20_no_precision_flag_is_used():
    used = used_api()
    assert "NetworkDefinitionCreationFlag.STRONGLY_TYPED" in used
    assert not {f"BuilderFlag.{flag}" for flag in PRECISION_FLAGS} & used


@pytest.mark.parametrize(("major", "flags"), [("10", PRECISION_FLAGS), ("11", set())])
def test_the_api_exists_in_tensorrt(major, flags, tmp_path):
    """And the difference is what we think: 10 still has the precision flags, 11 has none."""
    bindings = Path(sys.prefix, "tensorrt-bindings", major)
    if not bindings.is_dir():
        pytest.skip(f"no bindings of TensorRT {major} in {bindings}: `make install` puts them there")
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler for the stub of the library")
    (tmp_path / "stub.c").write_text(STUB)
    for name in ("nvinfer", "nvinfer_plugin", "nvonnxparser"):
        library = tmp_path / f"lib{name}.so.{major}"
        subprocess.run([compiler, "-shared", "-fPIC", "-o", library, tmp_path / "stub.c"], check=True)
    ours = {n for n in used_api() if not n.startswith(tuple(RTX_ONLY))}
    version, missing = _missing("tensorrt_bindings", ours, [bindings], tmp_path)
    assert version.startswith(f"{major}.") and missing == []
    _, absent = _missing("tensorrt_bindings", {f"BuilderFlag.{f}" for f in PRECISION_FLAGS}, [bindings], tmp_path)
    assert {name.split(".")[1] for name in absent} == PRECISION_FLAGS - flags
    # A name that does not exist is found: the check itself is not blind.
    assert _missing("tensorrt_bindings", {"Builder.no_such"}, [bindings], tmp_path)[1] == ["Builder.no_such"]


def test_the_api_exists_in_tensorrt_rtx():
    pytest.importorskip("tensorrt_rtx", reason="pip install 'modelkiln[rtx]'")
    assert _missing("tensorrt_rtx", used_api(), [], None)[1] == []
