"""`compile doctor`: what this machine has, what each lack prevents, and the command that mends it."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from compiler.addresses import ServerOptions
from compiler.engine_host import host_gpus, installed_version
from compiler.errors import ModelkilnError
from compiler.fingerprint import package_versions
from compiler.repository import Repository
from compiler.server import TritonServer, require_numpy_1, server_version
from compiler.shared_memory_need import MORE_SHARED_MEMORY, SHARED_MEMORY, shared_memory_need
from compiler.targets.tensorrt_library import TENSORRT, TENSORRT_RTX, Library, check_version
from compiler.triton_install import find_triton, python_version, require_stub

OK, LACK, FAULT = "ok", "lack", "fault"
_CPU_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "avx_vnni")


@dataclass(frozen=True)
class Check:
    """One thing looked at.

    Attributes:
        status: `ok`; `lack`, something optional that is absent; `fault`, something needed that is wrong.
        found: what was seen.
        prevents: what cannot be done because of it, or an empty string.
        fix: the command that mends it, or an empty string.
    """

    name: str
    status: str
    found: str
    prevents: str = ""
    fix: str = ""

    def to_json(self) -> dict[str, str]:
        return asdict(self)


def examine(repository: Repository) -> list[Check]:
    """Looks at everything `compile` uses. Starts a server on an empty repository, to see that it does start."""
    checks: list[Callable[[], Check]] = [
        _python,
        _numpy,
        *(lambda p=p, why=why, fix=fix: _package(p, why, fix) for p, why, fix in _PACKAGES),  # type: ignore[misc]
        _stub,
        _server,
        _cpu,
        _gpu,
        _tensorrt,
        _tensorrt_rtx,
        lambda: _shared_memory(repository),
    ]
    return [check() for check in checks]


_PACKAGES = (
    ("torch", "loading and exporting models", "pip install torch"),
    ("onnx", "exporting models", "pip install onnx"),
    ("onnxscript", "exporting models and fusing their graphs", "pip install onnxscript"),
    ("onnxruntime", "the target 'onnxruntime', and serving it here", "pip install 'modelkiln[cpu]'"),
    ("tritonclient", "config.pbtxt, clients and reports", "pip install 'tritonclient[grpc,http]'"),
)


def _python() -> Check:
    version = platform.python_version()
    if (3, 10) <= tuple(map(int, python_version().split("."))) < (3, 13):
        return Check("python", OK, version)
    return Check(
        "python",
        FAULT,
        version,
        "running at all; Python 3.10 to 3.12 are supported",
        "python3.11 -m venv .venv",
    )


def _numpy() -> Check:
    version = importlib.metadata.version("numpy")
    try:
        require_numpy_1()
    except ModelkilnError:
        return Check(
            "numpy",
            FAULT,
            version,
            "serving: Triton's Python backend answers garbage under numpy 2",
            "pip install 'numpy==1.26.4'",
        )
    return Check("numpy", OK, version)


def _package(name: str, why: str, fix: str) -> Check:
    for distribution in (name, f"{name}-gpu"):
        try:
            return Check(name, OK, importlib.metadata.version(distribution))
        except importlib.metadata.PackageNotFoundError:
            continue
    return Check(name, FAULT, "not installed", why, fix)


def _stub() -> Check:
    try:
        install = find_triton()
    except ModelkilnError:
        return Check(
            "python stub",
            FAULT,
            "no tritonserver",
            "serving models in Python, which includes every model here",
        )
    found = f"for Python {', '.join(install.stub_versions) or 'none'}; this is Python {python_version()}"
    try:
        require_stub(install)
    except ModelkilnError as error:
        return Check("python stub", FAULT, found, "serving: models would hang while loading", error.hint)
    return Check("python stub", OK, found)


def _server() -> Check:
    try:
        install = find_triton()
        with tempfile.TemporaryDirectory() as folder:
            options = ServerOptions(
                Path(folder),
                http_port=0,
                grpc_port=0,
                metrics_port=0,
                ready_timeout_s=20,
                extra=("--model-control-mode=explicit",),
            )
            with TritonServer(options) as server:
                return Check("tritonserver", OK, f"{server_version(server.addresses)} ({install.description}), starts")
    except ModelkilnError as error:
        return Check("tritonserver", FAULT, error.message, "compile serve", error.hint)


def _cpu() -> Check:
    model, flags = "unknown", set()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                model = value.strip()
            elif key.strip() == "flags":
                flags = set(value.split())
                break
    except OSError:
        model = platform.processor() or platform.machine()
    have = [f for f in _CPU_FLAGS if f in flags]
    if not flags or have:
        slow = "" if {"avx512_vnni", "avx_vnni"} & set(have) else "fast int8 (no VNNI)"
        return Check("cpu", OK, f"{model}: {', '.join(have) or platform.machine()}", slow)
    return Check("cpu", LACK, f"{model}: none of {', '.join(_CPU_FLAGS)}", "good speed; models run on SSE code")


def _gpu() -> Check:
    gpus = host_gpus()
    if gpus:
        found = "; ".join(f"{g.name}, compute capability {g.compute_capability}" for g in gpus)
        if package_versions(["torch"]).get("torch", "").endswith("+cpu"):
            prevents = "running an engine to judge it; torch is a CPU build and holds no GPU buffers"
            return Check("gpu", LACK, found, prevents, "pip install torch (the default build, with CUDA)")
        return Check("gpu", OK, found)
    return Check(
        "gpu",
        LACK,
        "no NVIDIA GPU",
        "building for 'tensorrt', and running any engine; models are compiled for and served on the CPU",
    )


def _tensorrt() -> Check:
    prevents = "the target 'tensorrt'"
    return _library(TENSORRT, prevents, "pip install 'modelkiln[gpu]' on an NVIDIA machine")


def _tensorrt_rtx() -> Check:
    prevents = "the target 'tensorrt-rtx', the one that builds engines without a GPU"
    return _library(TENSORRT_RTX, prevents, TENSORRT_RTX.install)


def _library(library: Library, prevents: str, fix: str) -> Check:
    version = installed_version(library.target)
    if not version:
        return Check(library.target, LACK, "not installed", prevents, fix)
    try:
        check_version(library, version)
    except ModelkilnError as error:
        return Check(library.target, LACK, error.message, prevents, fix)
    return Check(library.target, OK, version)


def _shared_memory(repository: Repository) -> Check:
    if not SHARED_MEMORY.is_dir():
        return Check("/dev/shm", FAULT, "absent", "serving models in Python", "mount -t tmpfs tmpfs /dev/shm")
    need = shared_memory_need(repository)
    free = shutil.disk_usage(SHARED_MEMORY).free
    if free < need.total_bytes:
        return Check("/dev/shm", FAULT, need.beside(free), "loading all models", MORE_SHARED_MEMORY)
    if free < 2 * need.total_bytes:
        return Check("/dev/shm", LACK, need.beside(free), "large requests", MORE_SHARED_MEMORY)
    return Check("/dev/shm", OK, need.beside(free))
