"""The spec's keys `metric` and `slo`: what the user asks of a candidate beyond answering as the model does."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from compiler.source_spec import FUNCTION, strings
from compiler.units import ms_from_text
from compiler.yaml_reader import Node

_PERCENTILE = re.compile(r"p(\d{1,2}(?:\.\d+)?)")
DEFAULT_CONCURRENCY = 1


@dataclass(frozen=True)
class MetricSpec:
    """A function of the user's that says how good a model is.

    Attributes:
        function: `module:function`; it gets a callable that runs the model on arrays by input name, and `args`.
        files: what the function reads, so that a change of it counts.
        min: the smallest value that passes, or None.
        max: the largest value that passes, or None.
    """

    function: str
    args: dict[str, Any]
    files: tuple[str, ...]
    min: float | None
    max: float | None

    def problem(self, value: float) -> str:
        """Returns why a value does not pass, or an empty string."""
        if self.min is not None and value < self.min:
            return f"metric {self.function} is {value:g}, below the {self.min:g} that the spec asks for"
        if self.max is not None and value > self.max:
            return f"metric {self.function} is {value:g}, above the {self.max:g} that the spec allows"
        return ""

    def to_json(self, value: float | None, eager: float | None) -> dict[str, Any]:
        """Returns what the manifest says of it."""
        return {"function": self.function, "value": value, "eager": eager, "min": self.min, "max": self.max}


@dataclass(frozen=True)
class SloSpec:
    """How fast a served model must answer.

    Attributes:
        percentile: of the latencies, over 0 and below 100.
        limit_ms: what that percentile must not exceed.
        concurrency: requests in flight while it is measured.
    """

    percentile: float
    limit_ms: float
    concurrency: int

    def __str__(self) -> str:
        return f"p{self.percentile:g}={self.limit_ms:g}ms at concurrency {self.concurrency}"


def read_metric(node: Node | None) -> MetricSpec | None:
    """Reads `metric:`."""
    if node is None:
        return None
    table = node.table("metric", required=("function",), optional=("args", "files", "min", "max"))
    function = table["function"].string("metric.function")
    if not FUNCTION.fullmatch(function):
        table["function"].fail(
            f"metric.function is {function!r}; allowed: 'package.module:function', a function that returns a number"
        )
    args, low, high = (table.get(k) for k in ("args", "min", "max"))
    if low is None and high is None:
        node.fail("metric needs 'min' or 'max': the value at which a candidate passes")
    return MetricSpec(
        function=function,
        args={k: v.plain() for k, v in args.mapping("metric.args").items()} if args else {},
        files=strings(table.get("files"), "metric.files"),
        min=low.number("metric.min") if low else None,
        max=high.number("metric.max") if high else None,
    )


def read_slo(node: Node | None) -> SloSpec | None:
    """Reads `slo: {p99: 10ms, concurrency: 8}`."""
    if node is None:
        return None
    given = node.mapping("slo")
    names = [key for key in given if key != "concurrency"]
    if len(names) != 1 or not (match := _PERCENTILE.fullmatch(names[0])) or not float(match[1]):
        node.fail(
            f"slo has {', '.join(names) or 'no percentile'}; allowed: one percentile and its limit, as in p99: 10ms"
        )
    limit_ms = ms_from_text(str(given[names[0]].value))
    if not limit_ms:
        given[names[0]].fail(f"slo.{names[0]} is {given[names[0]].value!r}; allowed: a time such as 10ms, 0.5ms or 2s")
    concurrency = given.get("concurrency")
    return SloSpec(
        percentile=float(match[1]),
        limit_ms=limit_ms,
        concurrency=concurrency.integer("slo.concurrency", 1, 1024) if concurrency else DEFAULT_CONCURRENCY,
    )
