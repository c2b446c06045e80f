"""TensorRT: an engine for Triton's `tensorrt` backend, built on the GPU that will serve it.

`write_engine`, `open` and `interface` are shared with TensorRT-RTX, the sibling that builds without a GPU.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compiler.engine_host import DISTRIBUTIONS, host_gpus
from compiler.errors import ModelRefused, one_of
from compiler.files import file_sha256
from compiler.targets import onnxruntime
from compiler.targets.registry import SOURCE_FILE, ArtifactTensor, Target
from compiler.targets.tensorrt_build import (
    Parsed,
    check_tensors,
    inspect_engine,
    make_config,
    parse_onnx,
    serialize_engine,
)
from compiler.targets.tensorrt_inspect import (
    INSPECTOR,
    NETWORK,
    narrowed_floats,
    precisions_of_network,
    refuse_lost_precision,
    wide_integers,
)
from compiler.targets.tensorrt_library import (
    ENGINE_FILE,
    TENSORRT,
    Library,
    load_library,
    machine_facts,
    require_library,
)
from compiler.targets.tensorrt_profiles import profiles_from_spec, refuse_batch_problems
from compiler.targets.tensorrt_runner import open_engine

if TYPE_CHECKING:
    import onnx_ir as ir

    from compiler.spec import ModelSpec

PRECISIONS = ("fp32", "fp16", "bf16", "int8")


def write_engine(library: Library, model: ir.Model, folder: Path, spec: ModelSpec) -> dict[str, Any]:
    """Writes `source.onnx` and the engine built from it; returns what the manifest says of the engine.

    Raises:
        ModelRefused: the graph, a profile or an option does not fit, or the precision asked for was not obtained.
        EnvironmentLacks: the library or the GPU that it needs is not here.
    """
    if spec.precision not in PRECISIONS:
        raise ModelRefused(
            f"the target '{library.target}' has no precision {spec.precision}; allowed: {one_of(PRECISIONS)}"
        )
    require_library(library)
    trt = load_library(library)
    onnxruntime.write_onnx(model, folder, name=SOURCE_FILE)
    source = folder / SOURCE_FILE
    parsed = parse_onnx(library, trt, source)
    inputs, outputs = interface(folder)
    check_tensors(parsed, inputs, outputs)
    integers = wide_integers(trt, model, parsed.network)
    # Judged before the build too: a lost precision should not cost the minutes of a large engine.
    network_layers = precisions_of_network(trt, parsed.network)
    refuse_lost_precision(spec.precision, network_layers, NETWORK)
    profiles = profiles_from_spec(spec, [t.name for t in inputs])
    profile_facts = {profile.name: profile.to_json() for profile in profiles}
    refuse_batch_problems(profile_facts, spec.max_batch_size)

    started = time.monotonic()
    config = make_config(parsed, profiles, spec.engine, spec.path.parent)
    blob = serialize_engine(parsed, config, spec.engine, spec.path.parent)
    seconds = time.monotonic() - started
    (folder / ENGINE_FILE).write_bytes(blob)
    layers, count, read_from = _layers_obtained(parsed, blob, network_layers)
    refuse_lost_precision(spec.precision, layers, read_from)
    return {
        "library": library.target,
        "library_version": str(trt.__version__),
        "compute_capabilities": _compute_capabilities(library, spec),
        "profile": profile_facts,
        "builder": spec.engine.to_json(library.target),
        "num_layers": count,
        "layers_by_precision": layers,
        "precision_read_from": read_from,
        "int64_constants": integers,
        "bytes": len(blob),
        "built_from": {"file": SOURCE_FILE, "sha256": file_sha256(source)},
        "build_seconds": round(seconds, 3),
        "notes": _notes(integers, narrowed_floats(model), layers, read_from, spec),
    }


def interface(folder: Path) -> tuple[tuple[ArtifactTensor, ...], tuple[ArtifactTensor, ...]]:
    """Reads inputs and outputs from `source.onnx`; `write` has compared the network's with them."""
    return onnxruntime.interface(folder, SOURCE_FILE)


def target_of(library: Library, backend: str) -> Target:
    """Returns the target of one of the siblings."""
    return Target(
        name=library.target,
        backend=backend,
        model_file=ENGINE_FILE,
        packages=("torch", "onnx", "onnx-ir", "onnxscript", "onnxruntime", *DISTRIBUTIONS[library.target]),
        write=functools.partial(write_engine, library),
        open=lambda folder, threads, facts: open_engine(library, folder),
        interface=interface,
        instance_kind="KIND_GPU",
        require=lambda: require_library(library),
        machine=lambda: machine_facts(library),
    )


def _layers_obtained(parsed: Parsed, blob: bytes, network_layers: Mapping[str, int]) -> tuple[dict[str, int], int, str]:
    """Returns layers by precision, their number and where that was read: the engine where it loads here."""
    inspected = inspect_engine(parsed, blob) if host_gpus() else None
    if inspected is None:
        return dict(network_layers), parsed.network.num_layers, NETWORK
    layers, count = inspected
    return layers, count, INSPECTOR


def _compute_capabilities(library: Library, spec: ModelSpec) -> list[str]:
    if library.builds_without_gpu:
        return list(spec.engine.compute_capabilities)
    # TensorRT builds on the current device, which is the first.
    return [host_gpus()[0].compute_capability]


def _notes(
    integers: list[dict[str, Any]], narrowed: list[str], layers: Mapping[str, int], read_from: str, spec: ModelSpec
) -> list[str]:
    """Returns what a person should read of the build."""
    found = ", ".join(f"{name} {count}" for name, count in layers.items())
    notes = [f"layers by precision, read from the {read_from}: {found}"]
    for fact in integers:
        if fact["held_as"] == "int64" and all(reader.endswith("(Slice)") for reader in fact["read_by"]):
            continue  # "to the end" of a slice, written as the largest int64
        readers = ", ".join(fact["read_by"])
        notes.append(f"int64 constant '{fact['name']}' is outside int32 ({readers}): {fact['held_as']}")
    if narrowed:
        notes.append(f"float64 is computed in fp32: {', '.join(narrowed[:8])}")
    if spec.engine.version_compatible:
        notes.append("start Triton with --backend-config=tensorrt,version-compatible=true to load this engine")
    return notes


TARGET = target_of(TENSORRT, backend="tensorrt")
