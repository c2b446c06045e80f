"""Modules as they come out of other tools: scripted, compiled, parallel, quantised, of transformers."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.entry import Entry, floats, ids


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).relu()


def scripted() -> nn.Module:
    return torch.jit.script(Net())


def traced() -> nn.Module:
    return torch.jit.trace(Net(), torch.zeros(2, 8))


def compiled() -> nn.Module:
    return torch.compile(Net())


def compiled_in_place() -> nn.Module:
    net = Net()
    net.compile()
    return net


def compiled_inside() -> nn.Module:
    return _Outer()


class _Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.compile(Net())

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + 1


def parallel() -> nn.Module:
    return nn.DataParallel(Net())


def sequential() -> nn.Module:
    return nn.Sequential(Net(), nn.Softmax(-1))


def quantised() -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(Net(), {nn.Linear}, dtype=torch.qint8)


def fx_traced() -> nn.Module:
    return torch.fx.symbolic_trace(Net())


def hooked() -> nn.Module:
    net = Net()
    net.register_forward_hook(lambda module, args, out: out * 2)
    return net


def no_grad() -> nn.Module:
    net = Net()
    net.forward = torch.no_grad()(net.forward)
    return net


def autocast() -> nn.Module:
    class Cast(Net):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return super().forward(x).float()

    return Cast()


def inference_mode() -> nn.Module:
    class Inference(Net):
        @torch.inference_mode()
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    return Inference()


def partial_forward() -> nn.Module:
    net = Net()
    net.forward = functools.partial(net.forward)
    return net


def checkpointed() -> nn.Module:
    class Checkpointed(Net):
        def forward(self, x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)

    return Checkpointed()


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(3))


def meta() -> nn.Module:
    with torch.device("meta"):
        return Net()


def generated() -> nn.Module:
    """Weights drawn anew at each call of the factory, without a seed."""
    return Net()


def transformers_model() -> nn.Module:
    from transformers import BertConfig, PreTrainedModel
    from transformers.utils import ModelOutput

    @dataclass
    class Output(ModelOutput):
        logits: Tensor | None = None
        hidden_states: tuple[Tensor, ...] | None = None
        past: Any = None

    class Classifier(PreTrainedModel):
        config_class = BertConfig

        def __init__(self, config: BertConfig) -> None:
            super().__init__(config)
            self.embed, self.head = nn.Embedding(31, config.hidden_size), nn.Linear(config.hidden_size, 3)
            self.post_init()

        def forward(self, input_ids: Tensor, labels: Tensor | None = None, return_dict: bool = True) -> Output:
            hidden = self.embed(input_ids)
            return Output(self.head(hidden.mean(1)), (hidden, hidden * 2))

    return Classifier(BertConfig(hidden_size=8))


X = (floats(),)
ENTRIES = (
    *(Entry(f, X) for f in (compiled, compiled_in_place, compiled_inside, parallel)),
    *(Entry(f, X, refused=("a torch.jit module", "return the nn.Module")) for f in (scripted, traced)),
    Entry(sequential, (floats("input"),)),
    *(Entry(f, X) for f in (fx_traced, hooked, no_grad, inference_mode, partial_forward)),
    Entry(checkpointed, X),
    Entry(quantised, X, refused=("torch.ao quantised: layer", "return the float model", "precision: int8")),
    Entry(autocast, X, refused=("node_linear", "bfloat16 by itself", "take torch.autocast")),
    Entry(
        lazy,
        (floats("input"),),
        refused=(
            "no shape yet: 0.weight, 0.bias",
            "call the model once",
        ),
    ),
    Entry(
        meta,
        X,
        refused=(
            "meta device",
            "layer.weight, layer.bias",
            "to_empty",
        ),
    ),
    Entry(generated, X),
    Entry(transformers_model, (ids("input_ids", "batch, 5"),), ("{name: logits}", "{name: hidden_states.1}")),
)
