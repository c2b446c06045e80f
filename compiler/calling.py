"""How forward is called, in the spec's names: `batch.left` is batch["left"], `hidden.1` is hidden[1]. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from compiler.errors import ModelRefused, did_you_mean, one_of

Value = TypeVar("Value")

_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9_.]")


def nested_inputs(tensors: Mapping[str, Value]) -> dict[str, Any]:
    """Returns forward's keyword arguments: `a.x` and `a.y` become one dict, `a.0` and `a.1` one list."""
    tree: dict[str, Any] = {}
    for name, value in tensors.items():
        *parents, last = name.split(".")
        node = tree
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = value
    return {name: _as_list(value) for name, value in tree.items()}


def _as_list(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    children = {name: _as_list(value) for name, value in node.items()}
    if set(children) == {str(i) for i in range(len(children))}:
        return [children[str(i)] for i in range(len(children))]
    return children


def output_leaves(result: Any) -> dict[str, Any]:
    """Returns everything that a model returned by the name that a spec can give it; None is left out.

    A key's characters that no name may hold become `_`; a name that would start with a digit gets `output_`.

    Raises:
        ModelRefused: two values would have one name.
    """
    found: dict[str, Any] = {}
    pending: list[tuple[tuple[str, ...], Any]] = [((), result)]
    while pending:
        path, value = pending.pop()
        children = _children(value)
        if children is not None:
            pending += [((*path, key), child) for key, child in reversed(children)]
        elif value is not None:
            name = _NOT_IN_A_NAME.sub("_", ".".join(path))
            name = f"output_{name}" if name[:1].isdigit() else name
            if name in found:
                raise ModelRefused(f"forward() returns two values that would both be called '{name}'")
            found[name] = value
    return found


def flatten_outputs(result: Any, wanted: Sequence[str]) -> tuple[Any, ...]:
    """Returns the output tensors in the spec's order.

    Where the model returns a dict, a dataclass or a named tuple, names are matched; a tuple's tensors are taken by
    position, those of tuples inside it too.

    Raises:
        ModelRefused: the names or the number of outputs are not those of the spec.
    """
    leaves = output_leaves(result)
    if _fields(result) is None:
        if len(leaves) != len(wanted):
            inner = ", ".join(n.removeprefix("output_") for n in leaves) if _children(result) is not None else ""
            nested = f" (by position: {inner})" if "." in inner else ""
            raise ModelRefused(
                f"forward() returns {len(leaves)} output(s){nested}, the spec names {len(wanted)}: {', '.join(wanted)}",
                hint="the spec's outputs stand for the returned tensors in their order, each of them once",
            )
        return tuple(leaves.values())
    tensors = [name for name, value in leaves.items() if hasattr(value, "shape")]
    for name in wanted:
        if name not in leaves:
            raise ModelRefused(
                f"forward() returns no output '{name}'{did_you_mean(name, tensors)}; it returns: {one_of(tensors)}",
                hint="outputs that come as a dict are matched by key, in any order; a tensor inside a tuple or "
                "a dict is called as in hidden_states.1",
            )
    return tuple(leaves[name] for name in wanted)


def _fields(value: Any) -> list[tuple[str, Any]] | None:
    """Returns the named parts of a dict, a dataclass or a named tuple; None of anything else."""
    if isinstance(value, Mapping):
        return [(str(key), child) for key, child in value.items()]
    if is_dataclass(value) and not isinstance(value, type):
        return [(f.name, getattr(value, f.name)) for f in fields(value)]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(value._fields, value, strict=True))
    return None


def _children(value: Any) -> list[tuple[str, Any]] | None:
    named = _fields(value)
    if named is None and isinstance(value, (tuple, list)):
        return [(str(i), child) for i, child in enumerate(value)]
    return named
