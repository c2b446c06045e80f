"""Which precision a target can run, why not, and what this machine's CPU does to int8."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

from compiler.errors import ModelRefused, UsageError, did_you_mean, one_of

PRECISIONS = ("fp32", "fp16", "bf16", "int8", "int8_dynamic")

_SUPPORTED = {
    "onnxruntime": ("fp32", "fp16", "int8", "int8_dynamic"),
    "openvino": ("fp32", "fp16", "bf16", "int8"),
    "tensorrt": ("fp32", "fp16", "bf16", "int8"),
    "tensorrt-rtx": ("fp32", "fp16", "bf16", "int8"),
}

_REASONS = {
    ("onnxruntime", "bf16"): (
        "ONNX Runtime's CPU provider has no bfloat16 kernels: the file would not load",
        "take precision: fp32 or int8, or target: openvino, which computes in bf16 by itself where the CPU can",
    ),
    ("openvino", "int8_dynamic"): (
        "OpenVINO has no fast path for DynamicQuantizeLinear and MatMulInteger graphs",
        "take precision: int8",
    ),
    ("tensorrt", "int8_dynamic"): (
        "TensorRT's parser knows neither DynamicQuantizeLinear nor MatMulInteger",
        "take precision: int8 (static Q/DQ)",
    ),
    ("tensorrt-rtx", "int8_dynamic"): (
        "TensorRT-RTX's parser knows neither DynamicQuantizeLinear nor MatMulInteger",
        "take precision: int8 (static Q/DQ)",
    ),
}

# Instructions that add four products of u8 * s8 in 32 bits. Without them x86 kernels add pairs in 16 bits, which
# saturate: 2 * 255 * 127 = 64,770 is over 32,767, while 2 * 255 * 64 = 32,640 fits (weights of 7 bits).
_WIDE_DOT = ("avx512_vnni", "avx_vnni", "amx_int8", "avx_vnni_int8")

# Instructions that multiply pairs of bfloat16 (x86, then ARM as Linux names it).
_BF16 = ("avx512_bf16", "amx_bf16", "bf16")


def supported(target: str) -> tuple[str, ...]:
    """Returns the precisions that can be asked of a target.

    Raises:
        UsageError: there is no such target.
    """
    if target not in _SUPPORTED:
        raise UsageError(
            f"no target '{target}'{did_you_mean(target, _SUPPORTED)}", hint=f"targets: {one_of(_SUPPORTED)}"
        )
    return _SUPPORTED[target]


def computes_bf16() -> bool:
    """Whether this CPU multiplies bfloat16; without it OpenVINO answers a request for bf16 in fp32, or emulates it."""
    return not cpu_flags().isdisjoint(_BF16)


def runnable(target: str) -> tuple[str, ...]:
    """Returns the precisions of a target that this machine's CPU can compute in; those of GPUs are not judged."""
    lacks = ("bf16",) if target == "openvino" and not computes_bf16() else ()
    return tuple(p for p in supported(target) if p not in lacks)


def refuse_unsupported(precision: str, target: str) -> None:
    """Refuses before any work what would fail at load, or would not be what was asked for.

    Raises:
        UsageError: no such precision or target.
        ModelRefused: the target cannot run it; the message says why and what to take.
    """
    allowed = supported(target)
    if precision not in PRECISIONS:
        raise UsageError(
            f"no precision '{precision}'{did_you_mean(precision, PRECISIONS)}", hint=f"precisions: {one_of(PRECISIONS)}"
        )
    if precision not in allowed:
        reason, advice = _REASONS[target, precision]
        raise ModelRefused(f"precision {precision} on target {target}: {reason}", hint=advice)
    if precision not in runnable(target):
        raise ModelRefused(
            f"precision {precision} on target {target}: this CPU has none of {', '.join(_BF16)}. It would compute in "
            "fp32, and what was proved here would not be what a CPU with bf16 serves",
            hint="take precision: fp32 or int8, or build on the CPU that will serve",
        )


def warnings(precision: str, target: str) -> tuple[str, ...]:
    """Returns what the user should know before relying on the combination."""
    if target == "onnxruntime" and precision == "fp16":
        return (
            "ONNX Runtime's CPU provider lacks float16 kernels and casts around nodes: on a CPU it is no faster, "
            "and may be slower than fp32; it pays on a GPU",
        )
    return ()


@cache
def cpu_flags() -> frozenset[str]:
    """Returns the CPU's feature flags as Linux names them; empty where /proc/cpuinfo has none."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return frozenset()
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def weight_bits(
    target: str, reduce_range: bool | None, flags: frozenset[str], machine: str = ""
) -> tuple[int, tuple[str, ...]]:
    """Decides between 8 and 7 bits for weights that meet unsigned activations.

    Args:
        target: where it will run; TensorRT's kernels never saturate.
        reduce_range: the user's choice, or None.
        flags: the CPU's, as `cpu_flags` gives them.
        machine: the CPU's architecture; this machine's by default.

    Returns:
        The bits, and notes that record the choice.
    """
    if target.startswith("tensorrt"):
        return 8, ()
    if reduce_range is not None:
        return (7 if reduce_range else 8), (f"weights have {7 if reduce_range else 8} bits, as asked",)
    if (machine or platform.machine()) not in ("x86_64", "AMD64"):
        return 8, ()
    found = sorted(flags.intersection(_WIDE_DOT))
    if found:
        return 8, (f"weights have 8 bits: this CPU has {found[0]}; on one without VNNI sums of products saturate",)
    return 7, (
        "weights have 7 bits: this CPU has no VNNI, its 16-bit sums of products would saturate at 8 "
        "(reduce_range=False where the serving CPU has VNNI)",
    )
