"""What an exporter's failure means: which dim, guard or operator, at which line of the model, what to change."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from compiler.cases import Case
from compiler.errors import ModelRefused, where_it_failed
from compiler.spec import ModelSpec

if TYPE_CHECKING:
    import torch

_SHAPE_OPS = ("view", "_unsafe_view", "reshape", "expand", "unflatten", "arange", "full", "zeros", "ones")
_FIXED_SIZE = (
    "use -1 or x.shape[...] in the model where it writes a fixed size (int(), len() and a Python loop over a size fix "
    "it too), or give the dim one size in the spec (min equal to max)"
)
# Decomposed for the sizes of the trace, without a guard: the graph is wrong, or fails, at others.
_BAKED = {"adaptive_avg_pool1d": 1, "adaptive_avg_pool2d": 2, "adaptive_avg_pool3d": 3, "adaptive_max_pool1d": 1,
          "adaptive_max_pool2d": 2, "adaptive_max_pool3d": 3}  # fmt: skip


def export_refusal(
    error: Exception, wrapper: torch.nn.Module, args: tuple[Any, ...], spec: ModelSpec, case: Case
) -> ModelRefused:
    """Translates an exception of torch.export."""
    if isinstance(error, ModelRefused):
        hint, error.hint = error.hint, ""
        return ModelRefused(where_it_failed(error).removeprefix("ModelRefused: "), hint=hint)
    text = str(error)
    violated = re.search(r"Constraints violated \(([^)]*)\)", text)
    if violated:
        guards = re.findall(r"^\s*- (.*)$", text, re.M)
        culprits = _baked_sizes(wrapper, args)
        where = f"; baked in by {'; '.join(culprits)}" if culprits else ""
        readable = "; ".join(_readable_guard(g, spec) for g in guards[:3])
        return ModelRefused(f"dim '{violated[1]}' is not dynamic in this model: {readable}{where}", hint=_FIXED_SIZE)
    if "data-dependent" in text or "GuardOnDataDependent" in type(error).__name__:
        return _value_refusal(_last_line(error) or user_line(text))
    hint = ""
    if "numpy" in text:
        hint = "no graph can hold numpy's work: write it with torch"
    return ModelRefused(f"torch.export failed at {case.name}: {where_it_failed(error)}", hint=hint)


def _value_refusal(place: str) -> ModelRefused:
    """A branch, a loop or a check on computed values."""
    hint = "use torch.where, or torch.cond, instead of a Python branch"
    if re.search(r":\d+: assert\b", place):
        hint = (
            "a served file checks nothing: take the assert out, or put it under `if not torch.compiler.is_exporting():`"
        )
    return ModelRefused(
        f"the graph depends on the values of a tensor{f', at `{place}`' if place else ''}; "
        "a Python `if`, `while` or a size on computed data cannot be exported",
        hint=hint,
    )


def _last_line(error: Exception) -> str:
    """Returns the model's line of the last node before torch.export gave up."""
    return user_line(str(getattr(error, "partial_fx_graph", "")))


def conversion_refusal(error: BaseException) -> ModelRefused:
    """Translates an exception of the ONNX exporter, which wraps one error in three."""
    place = ""
    while True:
        place = _line_of_node(error) or place
        if error.__cause__ is None:
            break
        error = error.__cause__
    at = f" at `{place}`" if place else ""
    missing = re.search(r"No ONNX function found for <OpOverload\(op='([^']+)'", str(error))
    if missing:
        return ModelRefused(
            f"the operator {missing[1]}{at} has no ONNX form",
            hint="write this line with other operators (sort with topk, median with sort and an index, a distance "
            "or an inverse with products and sums)",
        )
    return ModelRefused(
        f"the ONNX exporter failed{at}: {type(error).__name__}: {' '.join(str(error).split())[:400]}",
        hint="write this line with other operators" if at else "",
    )


def _line_of_node(error: BaseException) -> str:
    """Returns the model's line of the node that the exporter was translating: only its own frames know it."""
    import torch

    trace, place = error.__traceback__, ""
    while trace is not None:
        node = trace.tb_frame.f_locals.get("node")
        if isinstance(node, torch.fx.Node):
            place = user_line(str(node.meta.get("stack_trace", ""))) or place
        trace = trace.tb_next
    return place


def refuse_baked_operators(program: torch.export.ExportedProgram) -> None:
    """Refuses operators that the ONNX exporter writes down for the traced sizes only.

    Raises:
        ModelRefused: with the model's line.
    """
    for node in program.graph.nodes:
        if str(node.target).startswith("aten.embedding_bag"):
            raise ModelRefused(
                f"nn.EmbeddingBag at `{user_line(str(node.meta.get('stack_trace', '')))}` has no ONNX form that loads",
                hint="use nn.Embedding with the same weight, and a mean, sum or max over the ids' axis",
            )
        axes = _BAKED.get(str(node.target).removeprefix("aten.").split(".")[0]) if node.op == "call_function" else None
        if axes is None:
            continue
        sizes = node.args[0].meta["val"].shape[-axes:]
        wanted = node.args[1] if isinstance(node.args[1], (list, tuple)) else [node.args[1]] * axes
        if any(not isinstance(size, int) and want != 1 for size, want in zip(sizes, wanted, strict=True)):
            raise ModelRefused(
                f"{str(node.target).removeprefix('aten.').split('.')[0]} to {list(wanted)} at "
                f"`{user_line(str(node.meta.get('stack_trace', '')))}` has no ONNX form where the pooled size varies",
                hint="pool to 1, use torch.nn.functional.interpolate, or give the pooled dims one size in the spec",
            )


def _readable_guard(guard: str, spec: ModelSpec) -> str:
    """Rewrites L['args'][0].size()[1] as the tensor's name and axis."""

    def name(match: re.Match[str]) -> str:
        tensor = spec.inputs[int(match[1])]
        return f"{tensor.name}.shape[{match[2]}]"

    text = re.sub(r"L\['args'\]\[(\d+)\]\.size\(\)\[(\d+)\]", name, guard)
    return text.split(" If you're using")[0]


def _baked_sizes(wrapper: torch.nn.Module, args: tuple[Any, ...]) -> list[str]:
    """Traces with all sizes fixed and lists the shape nodes that hold a number, with the model's line."""
    import torch

    try:
        with hidden_prints():
            program = torch.export.export(wrapper, args)
    except Exception:
        return []
    found = []
    for node in program.graph.nodes:
        if node.op != "call_function":
            continue
        operator = str(node.target).removeprefix("aten.").split(".")[0]
        numbers = [n for a in node.args for n in (a if isinstance(a, (list, tuple)) else [a]) if type(n) is int]
        fixed = [n for n in numbers if n > 1]
        place = user_line(str(node.meta.get("stack_trace", "")))
        if operator in _SHAPE_OPS and fixed and place:
            found.append(
                f"node '{node.name}' with the size{'s'[: len(fixed) > 1]} {', '.join(map(str, fixed))} at {place}"
            )
    return found[:3]


def user_line(trace: str) -> str:
    """Returns `file:line: code` of the innermost frame in a printed trace, or an empty string."""
    frames = re.findall(r'File:? "?([^",\n]+)"?(?:, line |:)(\d+)(?:,)? in [^\n]*?(?:, code: |\n\s*)([^\n]+)', trace)
    frames = [f for f in frames if "/compiler/" not in f[0] and "/torch/" not in f[0]]
    if not frames:
        return ""
    file, line, code = frames[-1]
    return f"{file.rsplit('/', 1)[-1]}:{line}: {code.strip()}"


@contextlib.contextmanager
def hidden_prints() -> Iterator[None]:
    """Hides what torch.export prints of a graph that it could not finish; a user gets the refusal instead."""
    with contextlib.redirect_stderr(io.StringIO()):
        yield
