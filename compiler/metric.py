"""The user's own metric: a function of theirs that runs a model and says how good it is. It can be the gate."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from compiler.errors import ModelkilnError, ModelRefused, user_frames
from compiler.files import resolve_file
from compiler.goals import MetricSpec
from compiler.sources.code import factory_code, function_named, importable
from compiler.spec import ModelSpec
from compiler.targets.registry import Runner


@dataclass(frozen=True)
class Metric:
    """A metric with the value that the eager model reaches: what a candidate is judged by."""

    spec: ModelSpec
    goal: MetricSpec
    eager: float

    def judge(self, run: Runner) -> tuple[float, str]:
        """Returns a candidate's value and why it does not pass, or an empty string."""
        value = measure(self.spec, self.goal, run)
        problem = self.goal.problem(value)
        return value, f"{problem} (the eager model reaches {self.eager:g})" if problem else ""


def metric_for(spec: ModelSpec, eager: float | None) -> Metric | None:
    """Returns what judges the candidates, given the eager model's value; None where the spec has no metric."""
    return Metric(spec, spec.metric, eager) if spec.metric and eager is not None else None


def measure(spec: ModelSpec, goal: MetricSpec, run: Runner) -> float:
    """Imports and calls the user's function.

    Args:
        spec: the spec; modules beside it are found.
        goal: the metric.
        run: arrays by input name in, arrays by output name out.

    Raises:
        ModelRefused: the function raised, or returned something else than a finite number.
        SpecError: there is no such function.
    """
    shown = f"metric {goal.function}"
    with importable(spec.path.parent):
        function = function_named(spec.at("metric", "function"), "metric.function", goal.function, spec.path.parent)
        try:
            value = function(run, **goal.args)
        except ModelkilnError as error:
            raise ModelRefused(f"{shown}: {error.message}", hint=error.hint) from error
        except Exception as error:
            raise ModelRefused(f"{shown} failed: {user_frames(error)}") from error
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ModelRefused(f"{shown} returned {type(value).__name__}, not a number") from None
    if not math.isfinite(number):
        raise ModelRefused(f"{shown} returned {number}; allowed: a finite number")
    return number


def eager_metric(spec: ModelSpec, run: Runner) -> float | None:
    """Returns the value of the model as it was given, or None where the spec has no metric.

    Raises:
        ModelRefused: it does not pass itself: no candidate is held to more than the model can.
    """
    if spec.metric is None:
        return None
    value = measure(spec, spec.metric, run)
    if problem := spec.metric.problem(value):
        raise ModelRefused(f"the model itself does not pass: {problem}", hint="lower the limit, or improve the model")
    return value


def metric_code(spec: ModelSpec) -> dict[str, str]:
    """Returns what identifies the metric's code, which ran in this process; empty where there is none."""
    return factory_code(spec.metric.function) if spec.metric else {}


def metric_files(spec: ModelSpec) -> dict[str, Path]:
    """Returns the files that the metric reads, by the name that the spec gives them."""
    files = spec.metric.files if spec.metric else ()
    return {
        name: resolve_file(spec.at("metric", "files").value[index], name, spec.path.parent)
        for index, name in enumerate(files)
    }
