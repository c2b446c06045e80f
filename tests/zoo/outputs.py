"""Models by what they return and take: dicts, dataclasses, nested tuples, None, scalars, aliases, optional inputs."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.zoo.entry import Entry, floats, ids


class ReturnsDict(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"b": x + 1, "nothing": None, "a": x * 2}


@dataclasses.dataclass
class Heads:
    logits: Tensor
    hidden: tuple[Tensor, ...] | None = None
    loss: Tensor | None = None


class ReturnsDataclass(nn.Module):
    def forward(self, x: Tensor) -> Heads:
        return Heads(x * 3, (x + 1, x + 2))


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


class ReturnsNested(nn.Module):
    def forward(self, x: Tensor) -> tuple[Any, ...]:
        return x + 1, (x + 2, None, [x + 3, Pair(x + 4, x + 5)])


class ReturnsNestedDict(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"boxes": {"low": x - 1, "high": x + 1}, "levels": [x * 2, x * 3], 7: x}


class ReturnsTextToo(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"y": x + 1, "task": "classify", "count": 3}


class ReturnsPythonNumber(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        return x + 1, x.shape[0]


class ReturnsInput(nn.Module):
    """An output that is the input itself, and one that is a view of it."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x, x.view(x.shape[0], 2, 4), x + 1


class ReturnsTwice(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x + 1
        return y, y


class ReturnsConstant(nn.Module):
    """A second output that no input decides."""

    def __init__(self) -> None:
        super().__init__()
        self.anchors = nn.Buffer(torch.arange(8.0))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.anchors, self.anchors


class ReturnsScalar(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum()


class ReturnsNothing(nn.Module):
    def forward(self, x: Tensor) -> None:
        return None


class TakesScalar(nn.Module):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x * scale


class TakesOptional(nn.Module):
    def forward(self, x: Tensor, bias: Tensor | None = None, scale: Tensor | None = None) -> Tensor:
        if bias is not None:
            x = x + bias
        return x if scale is None else x * scale


class TakesFlag(nn.Module):
    """A keyword that is no tensor and has a default."""

    def forward(self, x: Tensor, normalise: bool = True, eps: float = 1e-6) -> Tensor:
        return x / (x.norm(dim=1, keepdim=True) + eps) if normalise else x


class TakesKwargs(nn.Module):
    def forward(self, **features: Tensor) -> Tensor:
        return features["age"] + features["income"]


class TakesArgs(nn.Module):
    def forward(self, *xs: Tensor) -> Tensor:
        return torch.stack(xs).sum(0)


class TakesDict(nn.Module):
    """All inputs in one dict, as data loaders give them."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["left"] + batch["right"]


class TakesList(nn.Module):
    def forward(self, xs: list[Tensor]) -> Tensor:
        return xs[0] + xs[1]


class TakesBool(nn.Module):
    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        return x * keep + (~keep).any(1, keepdim=True)


class TakesBytes(nn.Module):
    """Camera images as they come: uint8, scaled in the model."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, image: Tensor) -> Tensor:
        return self.conv(image.permute(0, 3, 1, 2).float() / 255)


class TakesInt8(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.to(torch.float32) * 0.5 + (x > 3)


class TakesDouble(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class TakesHalf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3).half()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class WeightsInHalf(nn.Module):
    """Half weights and float inputs: what a checkpoint loaded as it is gives."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class ReturnsBfloat16(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.bfloat16()


class ReturnsComplex(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.rfft(x)


class Spectrum(nn.Module):
    """Complex numbers inside, real ones outside."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.rfft(x).abs()


class IntegerDivision(nn.Module):
    def forward(self, n: Tensor) -> tuple[Tensor, ...]:
        return n // 3, n % 3, torch.div(n, 3, rounding_mode="trunc"), n / 3, n >> 1


ONE, X = ("{name: y}",), (floats(),)
ENTRIES = (
    Entry(ReturnsDict, X, ("{name: a}", "{name: b}")),
    Entry(ReturnsDataclass, X, ("{name: hidden.1}", "{name: logits}", "{name: hidden.0}")),
    Entry(ReturnsNested, X, tuple(f"{{name: y{i}}}" for i in range(1, 6))),
    Entry(ReturnsNestedDict, X, ("{name: boxes.high}", "{name: boxes.low}", "{name: levels.0}", "{name: levels.1}")),
    Entry(ReturnsTextToo, X),
    Entry(
        ReturnsPythonNumber,
        X,
        ("{name: y}", "{name: n}"),
        refused=(
            "output 'n' is int, not a tensor",
            "return it as a tensor",
        ),
    ),
    Entry(ReturnsInput, X, ("{name: same}", "{name: view}", "{name: y}")),
    Entry(ReturnsTwice, X, ("{name: y}", "{name: z}")),
    Entry(
        ReturnsConstant,
        X,
        ("{name: y}", "{name: anchors}"),
        refused=(
            "'anchors' has the shape [8]",
            "first axis is not the batch",
        ),
    ),
    Entry(ReturnsScalar, (floats("x", "8"),), dims=()),
    Entry(ReturnsNothing, X, refused=("returns 0 output(s), the spec names 1: y",)),
    Entry(TakesScalar, (floats("x", "4, 8"), floats("scale", "")), dims=()),
    Entry(TakesOptional, (floats(), floats("scale", "batch, 1"))),
    Entry(TakesFlag, X),
    Entry(TakesKwargs, (floats("age"), floats("income"))),
    Entry(
        TakesArgs,
        (floats("a"), floats("b")),
        refused=(
            "no input 'a'",
            "'xs' has no name",
            "wrap the model",
        ),
    ),
    Entry(TakesDict, (floats("batch.left"), floats("batch.right"))),
    Entry(TakesList, (floats("xs.0"), floats("xs.1"))),
    Entry(TakesBool, (floats(), "{name: keep, dtype: bool, shape: [batch, 8]}")),
    Entry(TakesBytes, (ids("image", "batch, 6, 6, 3", 255, dtype="uint8"),)),
    Entry(TakesInt8, (ids("x", "batch, 8", 127, -128, "int8"),)),
    Entry(TakesDouble, ("{name: x, dtype: float64, shape: [batch, 8]}",)),
    Entry(TakesHalf, ("{name: x, dtype: float16, shape: [batch, 8]}",)),
    Entry(
        WeightsInHalf,
        X,
        refused=(
            "the weights are bfloat16",
            "x float32",
            "return model.float()",
        ),
    ),
    Entry(
        ReturnsBfloat16,
        X,
        refused=(
            "'y' is bfloat16",
            "y.float()",
        ),
    ),
    Entry(
        ReturnsComplex,
        X,
        refused=(
            "'y' is complex64",
            "view_as_real",
        ),
    ),
    Entry(Spectrum, X),
    Entry(IntegerDivision, (ids("n", "batch, 4", 50, -50),), tuple(f"{{name: y{i}}}" for i in range(5))),
)
