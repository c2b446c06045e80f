"""The spec's `engine:` key: how a TensorRT engine is built. Each target takes only the keys that it can honour."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from typing import Any

from compiler.errors import did_you_mean, one_of
from compiler.units import bytes_from_text
from compiler.yaml_reader import Node, Table

HARDWARE_COMPATIBILITY = ("none", "ampere_plus", "same_compute_capability")
# What TensorRT-RTX 1.7 can build for; 7.5 has no bf16, so it is built for only where it is asked for.
RTX_COMPUTE_CAPABILITIES = ("7.5", "8.0", "8.6", "8.9", "12.0", "12.1")
RTX_DEFAULT_COMPUTE_CAPABILITIES = RTX_COMPUTE_CAPABILITIES[1:]

_COMMON_KEYS = ("builder_optimization_level", "refit", "tf32", "workspace")
# TensorRT-RTX 1.7 ignores a timing cache and a compatibility level, and cannot build a version-compatible engine.
ENGINE_KEYS = {
    "tensorrt": (*_COMMON_KEYS, "hardware_compatibility", "timing_cache", "version_compatible"),
    "tensorrt-rtx": (*_COMMON_KEYS, "compute_capabilities"),
}

_MIN_WORKSPACE_BYTES, _MAX_WORKSPACE_BYTES = 1 << 20, 1 << 40


@dataclass(frozen=True)
class EngineOptions:
    """How an engine is built; precision is not here, it is in the graph.

    Attributes:
        builder_optimization_level: 0 (fast build) to 5 (fast engine); None leaves the library's own.
        compute_capabilities: the GPUs to build for, such as `8.6` (tensorrt-rtx only).
        hardware_compatibility: one of HARDWARE_COMPATIBILITY.
        refit: whether weights can be replaced in the built engine.
        tf32: whether fp32 products may round their inputs to 10 bits; off, so that fp32 means fp32.
        timing_cache: a file beside the spec that is read and written, or None.
        version_compatible: whether newer versions of the library may load the engine.
        workspace_bytes: the most GPU memory that a layer may use for itself; None for no limit.
    """

    builder_optimization_level: int | None = None
    compute_capabilities: tuple[str, ...] = ()
    hardware_compatibility: str = "none"
    refit: bool = False
    tf32: bool = False
    timing_cache: str | None = None
    version_compatible: bool = False
    workspace_bytes: int | None = None

    def to_json(self, target: str) -> dict[str, Any]:
        """Returns the options that the target takes, for the manifest."""
        keys = {"workspace_bytes" if key == "workspace" else key for key in ENGINE_KEYS[target]}
        options = asdict(self) | {"compute_capabilities": list(self.compute_capabilities)}
        return {key: value for key, value in options.items() if key in keys}


def read_engine(node: Node | None, target: str) -> EngineOptions:
    """Reads `engine:` for a target.

    Raises:
        SpecError: a key that the target does not take, or a value out of range; with `file:line`.
    """
    if node is None:
        return EngineOptions(compute_capabilities=_default_capabilities(target))
    if target not in ENGINE_KEYS:
        node.fail(f"engine has no meaning for the target '{target}'; targets that build one: {one_of(ENGINE_KEYS)}")
    _refuse_foreign_keys(node, target)
    table = node.table("engine", optional=ENGINE_KEYS[target])
    level, compatibility, cache = (
        table.get(k) for k in ("builder_optimization_level", "hardware_compatibility", "timing_cache")
    )
    workspace, capabilities = table.get("workspace"), table.get("compute_capabilities")
    return EngineOptions(
        builder_optimization_level=level.integer("engine.builder_optimization_level", 0, 5) if level else None,
        compute_capabilities=_capabilities(capabilities) if capabilities else _default_capabilities(target),
        hardware_compatibility=(
            compatibility.choice("engine.hardware_compatibility", HARDWARE_COMPATIBILITY) if compatibility else "none"
        ),
        refit=_boolean(table, "refit"),
        tf32=_boolean(table, "tf32"),
        timing_cache=_file_beside(cache) if cache else None,
        version_compatible=_boolean(table, "version_compatible"),
        workspace_bytes=_bytes(workspace) if workspace else None,
    )


def _refuse_foreign_keys(node: Node, target: str) -> None:
    """A key that only the sibling takes is no typing mistake: say whose it is."""
    for key, child in node.mapping("engine").items():
        owners = [t for t, keys in ENGINE_KEYS.items() if key in keys]
        if owners and target not in owners:
            child.fail(
                f"engine.{key} has no meaning for the target '{target}' (only for {one_of(owners)}); "
                f"allowed: {one_of(ENGINE_KEYS[target])}"
            )


def _default_capabilities(target: str) -> tuple[str, ...]:
    return RTX_DEFAULT_COMPUTE_CAPABILITIES if target == "tensorrt-rtx" else ()


def _capabilities(node: Node) -> tuple[str, ...]:
    found: list[str] = []
    for item in node.items("engine.compute_capabilities"):
        # YAML reads 8.6 as a number and "8.6" as text; a person means the same.
        seen = str(float(item.value)) if _is_number(item.value) else str(item.value)
        if seen not in RTX_COMPUTE_CAPABILITIES:
            item.fail(
                f"an entry of engine.compute_capabilities is {seen}{did_you_mean(seen, RTX_COMPUTE_CAPABILITIES)}; "
                f"allowed: {', '.join(RTX_COMPUTE_CAPABILITIES)}"
            )
        if seen in found:
            item.fail(f"engine.compute_capabilities has {seen} twice")
        found.append(seen)
    if not found:
        node.fail(f"engine.compute_capabilities is empty; allowed: {', '.join(RTX_COMPUTE_CAPABILITIES)}")
    return tuple(sorted(found, key=lambda c: tuple(map(int, c.split(".")))))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _file_beside(node: Node) -> str:
    """The file is written: a spec from elsewhere must not choose one outside its own folder."""
    name = node.string("engine.timing_cache")
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\0" in name:
        node.fail(f"engine.timing_cache is {name!r}; allowed: a relative path below the spec's folder")
    return name


def _boolean(table: Table, key: str) -> bool:
    node = table.get(key)
    if node is None:
        return False
    if not isinstance(node.value, bool):
        node.fail(f"engine.{key} must be true or false, not {node.value!r}")
    return bool(node.value)


def _bytes(node: Node) -> int:
    size = bytes_from_text(node.value) if isinstance(node.value, str) else None
    if size is None:
        node.fail(f"engine.workspace is {node.value!r}; allowed: a size with its unit, such as 512MiB or 4GiB")
    if not _MIN_WORKSPACE_BYTES <= size <= _MAX_WORKSPACE_BYTES:
        node.fail(f"engine.workspace is {node.value}; allowed: 1MiB to 1024GiB")
    return size
