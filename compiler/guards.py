"""The guards that an exporter puts on sizes: read from its message, tried for every size of the spec. Pure.

torch.export gives up on `2*(h//2) - 2 < h` because it cannot prove it; all sizes of a spec can simply be tried.
"""

from __future__ import annotations

import ast
import itertools
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from compiler.spec import ModelSpec
from compiler.tensors import Dim

# How many combinations of sizes one guard is tried for; larger ranges are sampled evenly, their ends included.
MAX_TRIED = 20_000
# How far above a dim's min a better one is looked for.
MAX_START = 64

_SIZE = re.compile(r"L\['args'\]\[(\d+)\]\.size\(\)\[(\d+)\]")
_OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "max": max,
    "min": min,
    "Max": max,
    "Min": min,
    "Mod": operator.mod,
    "FloorDiv": operator.floordiv,
}


def guards_of(text: str, spec: ModelSpec) -> list[str]:
    """Returns the guards of a constraint violation in the spec's dims; none where it is about something else too."""
    lines = re.findall(r"^\s*- (.*)$", text, re.M)
    guards = [re.search(r"satisfy the generated guard (.*?)\.?$", line) for line in lines]
    if not lines or not all(guards):
        return []

    def dim(match: re.Match[str]) -> str:
        size = spec.inputs[int(match[1])].shape[int(match[2])]
        return str(size)

    return [_SIZE.sub(dim, guard[1]) for guard in guards if guard]


def unproved_guards(guards: Sequence[str], spec: ModelSpec) -> list[str]:
    """Returns the guards that fail for a size of the spec, or that cannot be read."""
    return [guard for guard in guards if not _always(guard, spec.dims)]


def smallest_sizes(guards: Sequence[str], spec: ModelSpec) -> dict[str, int]:
    """Returns the `min` for each dim from which on all guards hold; empty where there is none.

    Guards of several dims are not looked at: one dim's smallest size would depend on the other's.
    """
    found: dict[str, int] = {}
    for guard in unproved_guards(guards, spec):
        name = next((n for n in spec.dims if re.search(rf"\b{n}\b", guard)), "")
        if not name:
            return {}
        dim = spec.dims[name]
        starts = (low for low in range(dim.min + 1, min((dim.min + dim.max) // 2, dim.min + MAX_START) + 1))
        fit = next((low for low in starts if _always(guard, {name: replace(dim, min=low)})), None)
        if fit is None:
            return {}
        found[name] = max(fit, found.get(name, 0))
    return found


def _always(guard: str, dims: Mapping[str, Dim]) -> bool:
    try:
        tree = ast.parse(guard, mode="eval").body
    except SyntaxError:
        return False
    functions = {id(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call)}
    names = sorted({n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and id(n) not in functions})
    if not all(name in dims for name in names):
        return False
    most = int(MAX_TRIED ** (1 / max(len(names), 1)))
    try:
        return all(
            _value(tree, dict(zip(names, sizes, strict=True)))
            for sizes in itertools.product(*(_sizes(dims[name], most) for name in names))
        )
    except (ValueError, ArithmeticError):
        return False


def _sizes(dim: Dim, most: int) -> list[int]:
    count = dim.max - dim.min + 1
    if count <= most:
        return list(range(dim.min, dim.max + 1))
    return sorted({dim.min + (count - 1) * i // (most - 1) for i in range(most)})


def _value(node: ast.expr, sizes: Mapping[str, int]) -> Any:
    """Computes an expression of sizes; raises ValueError for what is not plain arithmetic."""
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return node.value
    if isinstance(node, ast.Name):
        return sizes[node.id]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, sizes)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(node.left, sizes), _value(node.right, sizes))
    if isinstance(node, ast.Compare) and all(type(op) in _OPERATORS for op in node.ops):
        values = [_value(v, sizes) for v in (node.left, *node.comparators)]
        return all(_OPERATORS[type(op)](a, b) for op, a, b in zip(node.ops, values, values[1:], strict=False))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS:
        return _FUNCTIONS[node.func.id](*(_value(a, sizes) for a in node.args))
    raise ValueError(ast.dump(node))
