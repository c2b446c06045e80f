"""Which runner computes a model on this machine's CPU: our own kernels where they can, else OpenVINO."""

from __future__ import annotations

import importlib.util
import platform

from backends.llm.loaders.base import LoadedModel
from backends.llm.models.config import DecoderConfig
from backends.llm.runners.base import ModelRunner
from backends.llm.runners.cpu_options import CpuOptions
from compiler.errors import EnvironmentLacks, UsageError

# What the kernels are made of; every server processor of Intel since 2019 and of AMD since 2022 has them.
_INSTRUCTIONS = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512vnni")


def open_cpu_runner(kind: str, model: LoadedModel, options: CpuOptions) -> ModelRunner:
    """Returns a runner with the model's weights in it.

    Args:
        kind: "numba", "openvino", or "auto": the fastest that computes this model with these options here.

    Raises:
        ModelkilnError: it cannot compute this, or its package is not installed.
    """
    lacks = "" if kind == "openvino" else numba_lacks(model.config, options)
    if kind == "numba" and lacks:
        raise UsageError(f"the numba runner cannot compute this: {lacks}", hint="use the openvino runner")
    if kind != "openvino" and not lacks:
        from backends.llm.runners.numba.runner import NumbaRunner

        return NumbaRunner(model, options)
    try:
        from backends.llm.runners.openvino import OpenVinoRunner
    except ModuleNotFoundError as error:
        why = "" if kind == "openvino" else f", and the numba runner cannot take its place: {lacks}"
        raise EnvironmentLacks(
            f"the openvino runner needs {error.name}, which is not installed{why}",
            hint="pip install 'modelkiln[llm,openvino]'",
        ) from None
    return OpenVinoRunner(model, options)


def missing_package(kind: str) -> str:
    """Returns the package that a runner's kind needs and that is not installed; nothing where there is all."""
    needed = {"auto": ("numba", "openvino"), "numba": ("numba",), "openvino": ("openvino",)}.get(kind, ())
    return "" if not needed or any(importlib.util.find_spec(name) for name in needed) else " or ".join(needed)


def numba_lacks(config: DecoderConfig, options: CpuOptions) -> str:
    """Returns why the numba runner cannot compute a model with these options on this machine; nothing if it can."""
    if options.exact:
        return "exact is true: its products are of bytes"
    if options.weights != "u8_rows":
        return f"weights is {options.weights}: it has u8_rows alone"
    if options.kv_cache_precision != "auto":
        return f"kv_cache_precision is {options.kv_cache_precision}: its cache is in bf16"
    if config.head_dim % 16 or config.hidden_size % 4:
        return f"head_dim is {config.head_dim} and hidden_size {config.hidden_size}: no multiples of 16 and 4"
    return machine_lacks()


def machine_lacks() -> str:
    """Returns why no model's kernels run on this machine; nothing if they do."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return f"this is {platform.system()} on {platform.machine()}: it is for Linux on x86_64"
    if importlib.util.find_spec("numba") is None:
        return "numba is not installed"
    from backends.llm.runners.numba.compiling import compiles, has_features

    if not compiles():
        return "NUMBA_DISABLE_JIT is set"
    if not has_features(*_INSTRUCTIONS):
        return f"the processor lacks one of {', '.join(_INSTRUCTIONS)}"
    return ""
