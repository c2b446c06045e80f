"""Building an engine: ONNX -> a strongly typed network -> one profile -> bytes. The same code for both libraries.

No precision flag is ever set: TensorRT 11 has none, and in 10 they would contradict the graph.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compiler.engine_options import EngineOptions
from compiler.errors import EnvironmentLacks, ModelRefused
from compiler.targets.registry import ArtifactTensor
from compiler.targets.tensorrt_inspect import onnx_types, precisions_of_inspection
from compiler.targets.tensorrt_library import Library, errors_of, make_log
from compiler.targets.tensorrt_profiles import InputProfile, check_network_shapes

MAX_NAMED_NODES = 12  # a model in an unsupported style fails in hundreds of nodes, all for the same few reasons


@dataclass(frozen=True)
class Parsed:
    """A parsed network with what must live as long as it does."""

    library: Library
    trt: Any
    log: Any
    builder: Any
    network: Any


def parse_onnx(library: Library, trt: Any, path: Path) -> Parsed:
    """Parses an ONNX file, weights beside it included.

    Raises:
        ModelRefused: with every node that the parser refuses, by name and operator.
        EnvironmentLacks: the library cannot start here (no GPU, an old driver).
    """
    log = make_log(trt)
    builder = trt.Builder(log)
    if not builder:
        raise EnvironmentLacks(f"{library.target} {trt.__version__} cannot start: {errors_of(log)}")
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, log)
    if not parser.parse_from_file(str(path)):
        refused = []
        for index in range(parser.num_errors):
            error = parser.get_error(index)
            reason = " ".join(error.desc().split())
            # "false" is the text of the condition that failed, not a reason.
            why = f": {reason[:200]}" if reason not in ("", "false") else ""
            refused.append(f"'{error.node_name()}' ({error.node_operator() or 'graph'}){why}")
        shown = dict.fromkeys(refused)
        more = f" and {len(shown) - MAX_NAMED_NODES} more" if len(shown) > MAX_NAMED_NODES else ""
        raise ModelRefused(
            f"{library.target} {trt.__version__} cannot take {len(shown)} node(s): "
            f"{', '.join(list(shown)[:MAX_NAMED_NODES]) or errors_of(log)}{more}",
            hint="express them with supported operators in the model, or use target: onnxruntime, which runs them",
        )
    return Parsed(library, trt, log, builder, network)


def check_tensors(parsed: Parsed, inputs: Sequence[ArtifactTensor], outputs: Sequence[ArtifactTensor]) -> None:
    """Compares the network's inputs and outputs with the graph's: config.pbtxt is written from the graph.

    Raises:
        ModelRefused: another name or type (float64 silently becomes float32), or an input that decides shapes.
    """
    network, types = parsed.network, onnx_types(parsed.trt)
    seen = [network.get_input(i) for i in range(network.num_inputs)]
    seen_outputs = [network.get_output(i) for i in range(network.num_outputs)]
    for kind, wanted, got in (("input", inputs, seen), ("output", outputs, seen_outputs)):
        if [t.name for t in wanted] != [t.name for t in got]:
            names = ", ".join(t.name for t in got)
            raise ModelRefused(f"the network's {kind}s are {names}; the graph's: {', '.join(t.name for t in wanted)}")
        for tensor, value in zip(wanted, got, strict=True):
            if types.get(value.dtype) != tensor.onnx_type:
                name = _type_name(tensor.onnx_type)
                raise ModelRefused(
                    f"{kind} '{tensor.name}' is {name} in the graph and {value.dtype} in {parsed.library.target}, "
                    f"which has no {name}",
                    hint="convert it to float32 in the model" if name == "float64" else "use target: onnxruntime",
                )
    for value in seen:
        if value.is_shape_tensor:
            raise ModelRefused(
                f"the values of input '{value.name}' decide the shape of a tensor, which one profile cannot cover",
                hint="pass the size as a dim of another input, or use target: onnxruntime",
            )


def make_config(parsed: Parsed, profiles: Sequence[InputProfile], options: EngineOptions, folder: Path) -> Any:
    """Returns the builder's config with one profile and the spec's options.

    Raises:
        ModelRefused: the library does not take an option, read back from the config.
    """
    trt = parsed.trt
    config = parsed.builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED  # without it the inspector tells names only
    _set_flags(trt, config, options)
    if options.builder_optimization_level is not None:
        config.builder_optimization_level = options.builder_optimization_level
        _check_level(parsed, options.builder_optimization_level, config.builder_optimization_level)
    if options.workspace_bytes is not None:
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.workspace_bytes)
    if options.compute_capabilities:
        _set_compute_capabilities(parsed, config, options.compute_capabilities)
    if options.hardware_compatibility != "none":
        config.hardware_compatibility_level = {
            "ampere_plus": trt.HardwareCompatibilityLevel.AMPERE_PLUS,
            "same_compute_capability": trt.HardwareCompatibilityLevel.SAME_COMPUTE_CAPABILITY,
        }[options.hardware_compatibility]
    if options.timing_cache is not None:
        _set_timing_cache(parsed, config, folder / options.timing_cache)
    _add_profile(parsed, config, profiles)
    return config


def _set_flags(trt: Any, config: Any, options: EngineOptions) -> None:
    if options.refit:
        config.set_flag(trt.BuilderFlag.REFIT)
    if options.version_compatible:
        config.set_flag(trt.BuilderFlag.VERSION_COMPATIBLE)
    # On by default in the library: it would round the inputs of every fp32 product to 10 bits.
    if not options.tf32:
        config.clear_flag(trt.BuilderFlag.TF32)


def _set_compute_capabilities(parsed: Parsed, config: Any, capabilities: Sequence[str]) -> None:
    trt = parsed.trt
    kinds = {
        "7.5": trt.ComputeCapability.SM75,
        "8.0": trt.ComputeCapability.SM80,
        "8.6": trt.ComputeCapability.SM86,
        "8.9": trt.ComputeCapability.SM89,
        "12.0": trt.ComputeCapability.SM120,
        "12.1": trt.ComputeCapability.SM121,
    }
    config.num_compute_capabilities = len(capabilities)
    for index, capability in enumerate(capabilities):
        if not config.set_compute_capability(kinds[capability], index):
            raise ModelRefused(
                f"{parsed.library.target} {trt.__version__} cannot build for compute capability {capability}: "
                f"{errors_of(parsed.log)}"
            )


def _set_timing_cache(parsed: Parsed, config: Any, path: Path) -> None:
    cache = config.create_timing_cache(path.read_bytes() if path.is_file() else b"")
    if not cache or not config.set_timing_cache(cache, ignore_mismatch=False):
        raise ModelRefused(
            f"the timing cache {path.name} is not one of {parsed.library.target} {parsed.trt.__version__} on this GPU: "
            f"{errors_of(parsed.log)}",
            hint=f"remove {path.name}; it is written again",
        )


def _add_profile(parsed: Parsed, config: Any, profiles: Sequence[InputProfile]) -> None:
    network = parsed.network
    inputs = [network.get_input(i) for i in range(network.num_inputs)]
    check_network_shapes(profiles, {tensor.name: tuple(tensor.shape) for tensor in inputs})
    profile = parsed.builder.create_optimization_profile()
    for wanted in profiles:
        profile.set_shape(wanted.name, wanted.min, wanted.opt, wanted.max)
        got = [tuple(shape) for shape in profile.get_shape(wanted.name)]
        assert got == [wanted.min, wanted.opt, wanted.max], f"profile of {wanted.name} reads back as {got}"
    if config.add_optimization_profile(profile) < 0:
        raise ModelRefused(f"{parsed.library.target} refuses the profile: {errors_of(parsed.log)}")


def _check_level(parsed: Parsed, wanted: int, got: int) -> None:
    """The library logs an error at a level that it does not know, and takes another."""
    if got != wanted:
        raise ModelRefused(
            f"engine.builder_optimization_level is {wanted}, and {parsed.library.target} {parsed.trt.__version__} set "
            f"{got}: {errors_of(parsed.log)}"
        )


def serialize_engine(parsed: Parsed, config: Any, options: EngineOptions, folder: Path) -> bytes:
    """Builds the engine and writes the timing cache back.

    Raises:
        ModelRefused: the builder failed; with the errors that it logged.
    """
    blob = parsed.builder.build_serialized_network(parsed.network, config)
    if blob is None or not blob.nbytes:
        raise ModelRefused(
            f"{parsed.library.target} {parsed.trt.__version__} cannot build the engine: {errors_of(parsed.log)}",
            hint=_build_hint(options, errors_of(parsed.log)),
        )
    if options.timing_cache is not None:
        path = folder / options.timing_cache
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        cache = config.get_timing_cache()
        beside.write_bytes(bytes(memoryview(cache.serialize())))
        beside.replace(path)
    return bytes(memoryview(blob))


def inspect_engine(parsed: Parsed, blob: bytes) -> tuple[dict[str, int], int] | None:
    """Loads the engine and counts its layers by precision; None where it cannot be loaded here or tells names only."""
    trt = parsed.trt
    runtime = trt.Runtime(parsed.log)
    engine = runtime.deserialize_cuda_engine(blob) if runtime else None
    if engine is None:
        return None
    inspector = engine.create_engine_inspector()
    layers = precisions_of_inspection(inspector.get_engine_information(trt.LayerInformationFormat.JSON))
    return (layers, engine.num_layers) if layers else None


def _build_hint(options: EngineOptions, errors: str) -> str:
    if options.refit and options.compute_capabilities:
        return "a TensorRT-RTX engine with refit can be built only on a machine with a GPU; drop engine.refit"
    if "7.5" in options.compute_capabilities and "b16" in errors:
        return "compute capability 7.5 has no bf16; drop it from engine.compute_capabilities, or use fp16"
    return "the message is the library's own; target: onnxruntime builds without it"


def _type_name(onnx_type: int) -> str:
    from compiler.dtypes import dtype_from_onnx

    dtype = dtype_from_onnx(onnx_type)
    return dtype.name if dtype else f"ONNX type {onnx_type}"
