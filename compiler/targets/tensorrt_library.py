"""The two sibling libraries, TensorRT and TensorRT-RTX: which versions work, how to get them, and what they log.

Both offer one API. What differs is data here; the code that builds and runs is shared.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from compiler.engine_host import host_gpus
from compiler.errors import EnvironmentLacks

ENGINE_FILE = "model.plan"


@dataclass(frozen=True)
class Library:
    """One of the siblings.

    Attributes:
        target: the name in specs, and in the manifest.
        module: what Python imports.
        versions: the oldest that works, and the first that does not.
        install: the command that installs it.
        builds_without_gpu: whether engines are made for GPUs that are named, not for the one that is here.
    """

    target: str
    module: str
    versions: tuple[tuple[int, ...], tuple[int, ...]]
    install: str
    builds_without_gpu: bool


# 10.13 is the first in which a strongly typed network covers all that is used here; 12 is not known.
TENSORRT = Library("tensorrt", "tensorrt", ((10, 13), (12,)), "pip install 'modelkiln[gpu]'", builds_without_gpu=False)
TENSORRT_RTX = Library(
    "tensorrt-rtx", "tensorrt_rtx", ((1, 7), (2,)), "pip install 'modelkiln[rtx]'", builds_without_gpu=True
)


def load_library(library: Library) -> Any:
    """Imports a library.

    Raises:
        EnvironmentLacks: it is absent, cannot be loaded, or is a version that is not supported.
    """
    try:
        module = importlib.import_module(library.module)
    except ModuleNotFoundError as error:
        raise EnvironmentLacks(
            f"the target '{library.target}' needs the Python package '{library.module}', which is not installed",
            hint=library.install + (" (on an NVIDIA machine)" if not library.builds_without_gpu else ""),
        ) from error
    except (ImportError, OSError) as error:
        raise EnvironmentLacks(
            f"the Python package '{library.module}' is installed and cannot be loaded: {error}",
            hint=library.install,
        ) from error
    check_version(library, str(module.__version__))
    return module


def check_version(library: Library, version: str) -> None:
    """Refuses a version with another API."""
    oldest, first_unknown = library.versions
    numbers = tuple(int(part) for part in version.split(".") if part.isdigit())
    if not oldest <= numbers < first_unknown:
        shown = [".".join(map(str, v)) for v in library.versions]
        raise EnvironmentLacks(
            f"{library.target} is {version}; supported: from {shown[0]} on, below {shown[1]}", hint=library.install
        )


def require_library(library: Library) -> None:
    """Refuses early, before a model is loaded and exported, what `write` would refuse after a minute.

    Raises:
        EnvironmentLacks: no library, or no GPU for a library that builds on the GPU that is here.
    """
    load_library(library)
    if not library.builds_without_gpu and not host_gpus():
        raise EnvironmentLacks(
            f"the target '{library.target}' builds on the GPU that will serve, and this machine has no NVIDIA GPU",
            hint="use target: tensorrt-rtx, which builds engines without a GPU, or target: onnxruntime, "
            "which is served on this machine",
        )


def make_log(trt: Any) -> Any:
    """Returns a logger that keeps warnings and errors as `(is_error, text)` in `lines` and prints nothing."""

    class KeepingLog(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.lines: list[tuple[bool, str]] = []

        def log(self, severity: Any, text: str) -> None:
            if severity in (trt.ILogger.INTERNAL_ERROR, trt.ILogger.ERROR, trt.ILogger.WARNING):
                self.lines.append((severity != trt.ILogger.WARNING, " ".join(text.split())))

    return KeepingLog()


def errors_of(log: Any) -> str:
    """Returns the errors in a log as one line, without those that only say that there is no GPU."""
    lines = [text for is_error, text in log.lines if is_error and "cudaError 35" not in text]
    lines = lines or [text for is_error, text in log.lines if is_error]
    return "; ".join(dict.fromkeys(lines))[:600] or "it gave no reason"


def machine_facts(library: Library) -> dict[str, Any]:
    """Returns what of this machine changes an engine beside versions, so that another GPU builds again."""
    if library.builds_without_gpu:
        return {}
    return {"compute_capabilities": sorted({gpu.compute_capability for gpu in host_gpus()})}
