"""YAML with its line numbers kept, so that every complaint about a spec names `file:line`.

Owns the reading and the type checks of single values; what the values mean is the spec's business.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml

from compiler.errors import SpecError, did_you_mean, one_of

MAX_FILE_BYTES = 1 << 20
_PLAIN_TAGS = {f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null", "map", "seq")}
MAX_NODES = 20_000  # an alias bomb expands far beyond this; a real spec has a hundred


@dataclass(frozen=True)
class Node:
    """A YAML value and where it stands.

    `value` is a scalar, a list of nodes, or a dict from key to node.
    """

    value: Any
    file: str
    line: int

    def fail(self, message: str, hint: str = "") -> NoReturn:
        raise SpecError(f"{self.file}:{self.line}: {message}", hint=hint)

    def table(self, what: str, *, required: Collection[str] = (), optional: Collection[str] = ()) -> Table:
        """Reads a mapping whose keys are known; refuses unknown and missing ones."""
        if not isinstance(self.value, dict):
            self.fail(f"{what} must be a mapping, not {_type_name(self.value)}")
        allowed = {*required, *optional}
        for key, child in self.value.items():
            if key not in allowed:
                child.fail(f"unknown key '{key}' in {what}{did_you_mean(key, allowed)}; allowed: {one_of(allowed)}")
        for key in required:
            if key not in self.value:
                self.fail(f"{what} lacks the key '{key}'; required: {one_of(required)}")
        return Table(self, what)

    def items(self, what: str) -> list[Node]:
        if not isinstance(self.value, list):
            self.fail(f"{what} must be a list, not {_type_name(self.value)}")
        return list(self.value)

    def mapping(self, what: str) -> dict[str, Node]:
        if not isinstance(self.value, dict):
            self.fail(f"{what} must be a mapping, not {_type_name(self.value)}")
        return dict(self.value)

    def string(self, what: str) -> str:
        if not isinstance(self.value, str) or not self.value:
            self.fail(f"{what} must be a non-empty string, not {_show(self.value)}")
        return str(self.value)

    def integer(self, what: str, minimum: int, maximum: int = 2**63 - 1) -> int:
        if isinstance(self.value, bool) or not isinstance(self.value, int):
            self.fail(f"{what} must be a whole number, not {_show(self.value)}")
        if not minimum <= self.value <= maximum:
            self.fail(f"{what} is {self.value}; allowed: {minimum} to {maximum}")
        return int(self.value)

    def number(self, what: str, minimum: float = -math.inf, maximum: float = math.inf) -> float:
        value = self.value
        # YAML 1.1 reads "1e-5" (no dot) as text; a person who writes it means the number.
        if isinstance(value, str):
            try:
                value = float(value)
            except ValueError:
                self.fail(f"{what} must be a number, not {_show(self.value)}")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            self.fail(f"{what} must be a finite number, not {_show(self.value)}")
        if not minimum <= value <= maximum:
            self.fail(f"{what} is {value}; allowed: {minimum:g} to {maximum:g}")
        return float(value)

    def choice(self, what: str, allowed: Collection[str]) -> str:
        if self.value not in allowed:
            self.fail(
                f"{what} is {_show(self.value)}{did_you_mean(str(self.value), allowed)}; allowed: {one_of(allowed)}"
            )
        return str(self.value)

    def plain(self) -> Any:
        """Returns the value without positions, as the YAML library would have loaded it."""
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.plain() for child in self.value]
        return self.value


@dataclass(frozen=True)
class Table:
    """A mapping whose keys were checked."""

    node: Node
    what: str

    def __getitem__(self, key: str) -> Node:
        child: Node = self.node.value[key]
        return child

    def get(self, key: str) -> Node | None:
        child: Node | None = self.node.value.get(key)
        return child if child is not None and child.value is not None else None


def read_yaml(path: Path) -> Node:
    """Reads one YAML document with positions.

    Raises:
        SpecError: no such file, not UTF-8 YAML, too large, or a key given twice.
    """
    shown = str(path)
    try:
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise SpecError(f"{shown}: the file has {size} bytes; a spec has at most {MAX_FILE_BYTES}")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise SpecError(f"{shown}: no such file", hint=_neighbours(path)) from None
    except IsADirectoryError:
        raise SpecError(f"{shown}: is a folder, not a spec file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{shown}: cannot be read: {error}") from None
    try:
        loader = yaml.SafeLoader(text)
        try:
            root = loader.get_single_node()
            if root is None:
                raise SpecError(f"{shown}:1: the file is empty")
            return _located(root, loader, shown, [0])
        finally:
            loader.dispose()  # type: ignore[no-untyped-call]
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise SpecError(f"{shown}:{line}: not valid YAML: {error.problem}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise SpecError(f"{shown}: not valid YAML: {error}") from None


def node_from_plain(value: Any, file: str) -> Node:
    """Wraps data that was read before (a spec in a manifest); every node stands in line 1."""
    if isinstance(value, dict):
        return Node({key: node_from_plain(child, file) for key, child in value.items()}, file, 1)
    if isinstance(value, list):
        return Node([node_from_plain(child, file) for child in value], file, 1)
    return Node(value, file, 1)


def _located(node: yaml.Node, loader: yaml.SafeLoader, file: str, seen: list[int]) -> Node:
    line = node.start_mark.line + 1
    seen[0] += 1
    if seen[0] > MAX_NODES:
        raise SpecError(f"{file}:{line}: more than {MAX_NODES} values (aliases counted each time)")
    if node.tag not in _PLAIN_TAGS:
        kind = node.tag.removeprefix("tag:yaml.org,2002:")
        raise SpecError(f"{file}:{line}: a value of the type '{kind}' has no place in a spec; put text in quotes")
    value: Any
    if isinstance(node, yaml.MappingNode):
        value = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise SpecError(f"{file}:{key_node.start_mark.line + 1}: a key must be plain text")
            key = str(key_node.value)
            if key in value:
                raise SpecError(
                    f"{file}:{key_node.start_mark.line + 1}: the key '{key}' stands twice "
                    f"(first in line {value[key].line})"
                )
            child = _located(value_node, loader, file, seen)
            # A wrong key is reported where the key stands, not where its value begins.
            value[key] = Node(child.value, file, key_node.start_mark.line + 1)
    elif isinstance(node, yaml.SequenceNode):
        value = [_located(item, loader, file, seen) for item in node.value]
    else:
        value = loader.construct_object(node)  # type: ignore[no-untyped-call]
    return Node(value, file, line)


def _neighbours(path: Path) -> str:
    try:
        names = sorted(p.name for p in path.parent.glob("*.yaml"))
    except OSError:
        return ""
    return f"specs in {path.parent}: {', '.join(names[:8])}" if names else ""


def _type_name(value: Any) -> str:
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    return _show(value)


def _show(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, (dict, list)):
        return _type_name(value)
    return repr(value)
