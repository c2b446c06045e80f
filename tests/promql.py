"""What a PromQL expression asks for, as far as the tests need it: metrics, the labels they are asked for, the rest."""

from __future__ import annotations

import re
from dataclasses import dataclass

# All metrics that are asked for begin like this; functions and keywords do not.
_SELECTOR = re.compile(r"\b((?:vllm:|modelkiln:|nv_)\w+)\s*(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")


@dataclass(frozen=True)
class Selector:
    """One metric in an expression; a matcher is (label, operator, value)."""

    metric: str
    matchers: tuple[tuple[str, str, str], ...]


def selectors(expression: str) -> list[Selector]:
    """Returns the metrics of an expression, in their order."""
    found = []
    for name, inside in _SELECTOR.findall(expression):
        matchers = tuple(_MATCHER.findall(inside))
        left = re.sub(r"[\s,]", "", _MATCHER.sub("", inside))
        assert not left, f"cannot read {left!r} in {inside!r}"
        found.append(Selector(name, matchers))
    return found


def grouping_labels(expression: str) -> set[str]:
    """Returns the labels that an expression groups or joins by."""
    return {label.strip() for inside in _GROUPING.findall(expression) for label in inside.split(",") if label.strip()}
