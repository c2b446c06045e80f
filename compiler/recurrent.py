"""LSTM, GRU and RNN layers kept whole in an export, where torch would unroll the steps of one length.

While an export runs, torch's own functions are replaced by one operator per layer and direction pair, whose
translation is ONNX's LSTM, GRU or RNN. Gates are reordered in torch; constant folding makes weights of that.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from compiler.errors import ModelRefused

if TYPE_CHECKING:
    import torch


_NAME = "modelkiln::recurrent"
_SCHEMA = (
    "(Tensor x, Tensor w, Tensor r, Tensor b, Tensor h, Tensor c, str kind, str activation) -> (Tensor, Tensor, Tensor)"
)


@dataclass(frozen=True)
class _Kind:
    """A kind of layer.

    Attributes:
        gates: ONNX's order of torch's gates: LSTM i,f,g,o -> i,o,f,c; GRU r,z,n -> z,r,h.
        activation: of a plain RNN.
    """

    name: str
    gates: tuple[int, ...]
    activation: str = ""


_KINDS = {
    "lstm": _Kind("LSTM", (0, 3, 1, 2)),
    "gru": _Kind("GRU", (1, 0, 2)),
    "rnn_tanh": _Kind("RNN", (0,), "Tanh"),
    "rnn_relu": _Kind("RNN", (0,), "Relu"),
}


@contextlib.contextmanager
def recurrent_layers_whole() -> Iterator[None]:
    """Replaces torch's recurrent functions while an export runs."""
    import torch

    _operator()
    functions = torch._VF
    stand_ins: dict[str, Any] = {"_pack_padded_sequence": _refuse_packing}
    for name, kind in _KINDS.items():
        stand_ins[name] = functools.partial(_layers, kind, getattr(functions, name))
    for name, stand_in in stand_ins.items():
        setattr(functions, name, stand_in)
    try:
        yield
    finally:
        for name in stand_ins:
            delattr(functions, name)  # what it hid is found by the module's own __getattr__


def _refuse_packing(*args: Any) -> Any:
    raise ModelRefused(
        "pack_padded_sequence makes a form that depends on the values of the lengths, which no graph can have",
        hint="give the layer the padded tensor and mask its result; a bidirectional layer then also reads the padding",
    )


def recurrent_translation() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Returns what the ONNX exporter makes of our operator, for its custom_translation_table."""
    return {_operator(): _onnx_layer}


def _layers(kind: _Kind, original: Callable[..., Any], x: torch.Tensor, state: Any, *more: Any) -> tuple[Any, ...]:
    """Stands for torch._VF.lstm and its like; the arguments are torch's own."""
    import torch

    params, has_biases, num_layers, _, _, bidirectional, batch_first = more
    states: Sequence[torch.Tensor] = state if kind.name == "LSTM" else (state,)
    if kind.name == "LSTM" and states[0].shape[-1] != states[1].shape[-1]:
        result: tuple[Any, ...] = original(x, state, *more)  # proj_size: ONNX has no such layer
        return result
    directions = 2 if bidirectional else 1
    size = (4 if has_biases else 2) * directions
    y = x.transpose(0, 1) if batch_first else x
    last: list[tuple[torch.Tensor, ...]] = []
    for layer in range(num_layers):
        weights = _weights(kind, params[layer * size : (layer + 1) * size], has_biases)
        own = [s[layer * directions : (layer + 1) * directions] for s in states]
        y, h, c = torch.ops.modelkiln.recurrent(y, *weights, own[0], own[-1], kind.name, kind.activation)
        y = y.transpose(1, 2).flatten(2)  # [length, batch, directions * hidden]
        last.append((h, c)[: len(states)])
    ends = tuple(torch.cat(parts) for parts in zip(*last, strict=True))
    return (y.transpose(0, 1) if batch_first else y, *ends)


def _weights(kind: _Kind, params: Sequence[torch.Tensor], has_biases: bool) -> tuple[torch.Tensor, ...]:
    """Returns W, R and B as ONNX wants them: [directions, gates * hidden, ...]."""
    import torch

    def ordered(tensor: torch.Tensor) -> torch.Tensor:
        hidden = tensor.shape[0] // len(kind.gates)
        return torch.cat([tensor[i * hidden : (i + 1) * hidden] for i in kind.gates])

    size = 4 if has_biases else 2
    each = [[ordered(p) for p in params[at : at + size]] for at in range(0, len(params), size)]
    biases = [torch.cat(d[2:]) if has_biases else d[0].new_zeros(2 * d[0].shape[0]) for d in each]
    return torch.stack([d[0] for d in each]), torch.stack([d[1] for d in each]), torch.stack(biases)


@functools.cache
def _operator() -> Any:
    """Defines the operator once; it exists for exports only and is never run."""
    import torch

    torch.library.define(_NAME, _SCHEMA)

    @torch.library.register_fake(_NAME)  # type: ignore[untyped-decorator]
    def _(x: Any, w: Any, r: Any, b: Any, h: Any, c: Any, kind: str, activation: str) -> Any:
        y = x.new_empty(x.shape[0], w.shape[0], x.shape[1], r.shape[-1])
        return y, torch.empty_like(h), torch.empty_like(c)

    return torch.ops.modelkiln.recurrent.default


def _onnx_layer(x: Any, w: Any, r: Any, b: Any, h: Any, c: Any, kind: str, activation: str) -> Any:
    from onnxscript import opset18 as op

    sizes = {"hidden_size": int(r.shape[-1]), "direction": "bidirectional" if int(w.shape[0]) == 2 else "forward"}
    if kind == "LSTM":
        return op.LSTM(x, w, r, b, None, h, c, **sizes)
    if kind == "GRU":
        y, last = op.GRU(x, w, r, b, None, h, linear_before_reset=1, **sizes)
    else:
        y, last = op.RNN(x, w, r, b, None, h, activations=[activation] * int(w.shape[0]), **sizes)
    return y, last, op.Identity(last)
