"""What people write in forward: fixed sizes, in-place work, state, randomness, branches, and the plainer operators."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.entry import Entry, floats, ids

X = (floats(),)
LENGTHS = ("batch: {max: 4}", "length: {min: 1, opt: 6, max: 12}")
FRAMES = (floats("x", "batch, length, 8"),)


class FixedView(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(5, -1)


class IntOfShape(nn.Module):
    """int() of a size that is not fixed: torch.export keeps it open."""

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(int(x.shape[0]), 4, int(x.shape[1] / 4)).sum(1)


class LenOfTensor(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(len(x), -1) / math.sqrt(x.size(-1))


class SizeTensor(nn.Module):
    """A mean by hand: the length as a number in the graph."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sum(1) / x.shape[1] + torch.tensor(x.shape[1]).float().log()


class LoopOverLength(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.zeros_like(x[:, 0])
        for i in range(x.shape[1]):
            y = y * 0.5 + x[:, i]
        return y


class IterateRows(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([row.softmax(-1) for row in x])


class SplitInHalf(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return a * b.sigmoid()


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.clone()
        y[:, 0] = 0
        y[:, 1:3] += 1
        y.mul_(2).clamp_(-3, 3)
        y[y < 0] = -1
        return y


class ChangesItsInput(nn.Module):
    """In place on the input: what the caller sees after the call too."""

    def forward(self, x: Tensor) -> Tensor:
        x += 1
        return x * 2


class CountsCalls(nn.Module):
    """A buffer that forward updates and uses: the second call answers otherwise than the first."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.calls


class CountsQuietly(CountsCalls):
    """A buffer that is updated and never read: statistics that nobody serves."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * 2


class RemembersInPython(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.step = 0

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        return x * self.step


class TrainsAlways(nn.Module):
    """Monte-Carlo dropout: functional dropout with training=True."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5, training=True)


class NormInTraining(nn.Module):
    """Batch statistics on purpose: a row's answer depends on the other rows of the batch."""

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, None, None, training=True)


class RefusesEval(nn.Module):
    """A train() that does nothing, as frozen wrappers have it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.3)

    def train(self, mode: bool = True) -> RefusesEval:
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.norm(x))


class Noise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x) * 0.1


class Samples(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.multinomial(x.softmax(-1), 1)


class BranchOnValue(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x
        return -x


class BranchOnItem(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * (2 if x.max().item() > 1 else 3)


class LoopOnValue(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        while x.abs().max() > 1:
            x = x / 2
        return x


class Assertion(nn.Module):
    """A check of values on the way, which the served file cannot have."""

    def forward(self, x: Tensor) -> Tensor:
        assert torch.isfinite(x).all(), "x must be finite"
        return x + 1


class Condition(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x * 2, (x,))


class NumpyInside(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(x.numpy().clip(-1, 1))


class ToDevice(nn.Module):
    """`.to("cuda")` where there is one: harmless on a CPU."""

    def forward(self, x: Tensor) -> Tensor:
        return x.to("cuda" if torch.cuda.is_available() else "cpu").contiguous()


class ScatterGather(nn.Module):
    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        y = torch.zeros_like(x).scatter_add(1, at, x)
        y = y.index_put((torch.arange(x.shape[0]), torch.tensor([1])), torch.tensor([9.0]))
        return y + x.gather(1, at) + x.index_select(1, torch.tensor([1, 0] * 4)) + x[:, [7, 6, 5, 4, 3, 2, 1, 0]]


class Cumulate(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(1) + x.flip(1).cumsum(1).flip(1) + x.sigmoid().cumprod(1) + x.cummax(1).values


class Statistics(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat(
            [x.mean(1, True), x.std(1, keepdim=True), x.var(1, False, keepdim=True), x.median(1, True).values,
             x.logsumexp(1, True), x.norm(dim=1, keepdim=True), x.quantile(0.5, 1, True)], 1
        )  # fmt: skip


class Sorts(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        values, index = x.sort(dim=1, descending=True)
        return values, index, x.argsort(1)


class Means(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        parts = [x.mean(1, True), x.std(1, keepdim=True), x.var(1, False, keepdim=True), x.logsumexp(1, True)]
        return torch.cat([*parts, x.norm(dim=1, keepdim=True), x.cumsum(1), x.flip(1)], 1)


class Searches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.bucketize(x, torch.tensor([-1.0, 0.0, 1.0]))


class Uniques(nn.Module):
    def forward(self, n: Tensor) -> Tensor:
        return torch.unique(n)


class Rolls(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.roll(1, 1) + torch.tril(x[:, None] * x[:, :, None]).sum(1) + x.repeat_interleave(2, 1)[:, ::2]


class Unfolds(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.unfold(1, 4, 2)


class Activations(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(x) + F.gelu(x, approximate="tanh") + F.silu(x) + F.mish(x) + F.elu(x) + F.softplus(x) + F.relu6(x)
        return y + F.hardtanh(x) + F.leaky_relu(x) + F.selu(x) + torch.erf(x) + F.glu(torch.cat([x, x], 1), 1)


class SharedWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(31, 8), nn.Linear(8, 31, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids).sum(1))


class WeightNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.new = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
        self.old = nn.utils.weight_norm(nn.Linear(8, 8))
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.spectral(self.old(self.new(x)))


class NormWithoutAffine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.group = nn.LayerNorm(8, elementwise_affine=False), nn.GroupNorm(2, 8, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.group(x)


class EmbeddingBag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(31, 4, mode="mean")

    def forward(self, ids: Tensor) -> Tensor:
        return self.bag(ids)


class PaddingIndex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 4, padding_idx=0, max_norm=1.0)

    def forward(self, ids: Tensor) -> Tensor:
        return self.embed(ids).sum(1)


class OneHot(nn.Module):
    def forward(self, ids: Tensor) -> Tensor:
        return F.one_hot(ids, 31).float().mean(1)


class Distances(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cdist(x, torch.eye(8)) + F.cosine_similarity(x[:, None], torch.eye(8), dim=-1)


class Polynomial(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.inv(torch.eye(8) * 9 + x[:, None] * 0.1) @ x[..., None]


class DivisibleLength(nn.Module):
    """A window attention's beginning: the length must divide by four."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], -1, 4, 8).sum(2)


class EvenPairs(nn.Module):
    """x[:, ::2] + x[:, 1::2]: equal only for even lengths."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, ::2] + x[:, 1::2]


class OddEvenBranch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] % 2:
            x = F.pad(x, (0, 0, 0, 1))
        return x


class Windows(nn.Module):
    """Padded to a multiple of four and cut into windows: a single window is another program."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x, (0, 0, 0, (4 - x.shape[1] % 4) % 4))
        return x.view(x.shape[0], x.shape[1] // 4, 4, 8).mean(2)


class SomeWindows(Windows):
    """The same, where the spec leaves the single window out."""


class BatchMean(nn.Module):
    """Rows that depend on each other: right in eager, wrong for callers who share a batch."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class TakesMode(nn.Module):
    def forward(self, x: Tensor, mode: str) -> Tensor:
        return x * 2 if mode == "double" else x


class TwoDimsOneSize(nn.Module):
    """Two inputs whose lengths must be equal, under two names in the spec."""

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return x + z


class BigTable(nn.Module):
    """2 MiB of weights: over a limit for files that a test lowers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16384, 32)

    def forward(self, ids: Tensor) -> Tensor:
        return self.embed(ids).sum(1)


IDS = (ids("ids", "batch, 5"),)
ENTRIES = (
    Entry(
        FixedView,
        X,
        refused=(
            "x.view(5, -1)",
            "batch 1..5",
            "narrow the dims",
        ),
    ),
    Entry(
        IntOfShape,
        X,
        refused=(
            "dim 'batch' is not dynamic",
            "'reshape'",
            "idioms.py:",
            "int(), len()",
        ),
    ),
    Entry(
        LenOfTensor,
        X,
        refused=(
            "dim 'batch' is not dynamic",
            "'reshape' with the size 3",
            "len(x)",
        ),
    ),
    Entry(SizeTensor, FRAMES, dims=LENGTHS),
    Entry(
        LoopOverLength,
        FRAMES,
        dims=LENGTHS,
        refused=(
            "dim 'length' is not dynamic",
            "a Python loop over a size",
        ),
    ),
    Entry(
        IterateRows,
        X,
        refused=(
            "dim 'batch' is not dynamic",
            "a Python loop over a size",
        ),
    ),
    Entry(SplitInHalf, X),
    Entry(InPlace, X),
    Entry(ChangesItsInput, X),
    Entry(
        CountsCalls,
        X,
        refused=(
            "differently the second time",
            "changes its state: calls",
        ),
    ),
    Entry(CountsQuietly, X),
    Entry(
        RemembersInPython,
        X,
        refused=(
            "differently the second time",
            "keeps something between calls",
        ),
    ),
    Entry(
        TrainsAlways,
        X,
        refused=(
            "differently the second time",
            "draws random numbers",
            "dropout with training=True",
        ),
    ),
    Entry(
        NormInTraining,
        X,
        dims=("batch: {max: 5}",),
        refused=(
            "when training",
            "training=False",
        ),
    ),
    Entry(
        RefusesEval,
        X,
        refused=(
            "stay in training mode after eval(): norm (BatchNorm1d), drop (Dropout)",
            "must reach them",
        ),
    ),
    Entry(
        Noise,
        X,
        refused=(
            "differently the second time",
            "draws random numbers",
        ),
    ),
    Entry(Samples, X, refused=("draws random numbers",)),
    Entry(
        BranchOnValue,
        X,
        refused=(
            "`idioms.py:",
            "if x.sum() > 0:`",
            "torch.where",
        ),
    ),
    Entry(
        BranchOnItem,
        X,
        refused=(
            "`idioms.py:",
            "x.max().item() > 1",
            "torch.where",
        ),
    ),
    Entry(
        LoopOnValue,
        X,
        refused=(
            "`idioms.py:",
            "while x.abs().max() > 1:`",
            "torch.where",
        ),
    ),
    Entry(
        Assertion,
        X,
        refused=(
            "`idioms.py:",
            "assert torch.isfinite",
            "take the assert out",
        ),
    ),
    Entry(Condition, X),
    Entry(
        NumpyInside,
        X,
        refused=(
            "idioms.py:",
            "x.numpy().clip(-1, 1)",
            "write it with torch",
        ),
    ),
    Entry(ToDevice, X),
    Entry(ScatterGather, (floats(), ids("at", "batch, 8", 7))),
    Entry(
        Cumulate,
        X,
        refused=(
            "the operator prims.prod at `idioms.py:",
            "has no ONNX form",
            "other operators",
        ),
    ),
    Entry(
        Statistics,
        X,
        refused=(
            "the operator aten.median at `idioms.py:",
            "has no ONNX form",
        ),
    ),
    Entry(Sorts, X, ("{name: v}", "{name: i}", "{name: j}")),
    Entry(Means, X),
    Entry(Searches, X),
    Entry(Uniques, (ids("n", "9", 5),), dims=()),
    Entry(Rolls, X),
    Entry(Unfolds, X),
    Entry(Activations, X),
    Entry(SharedWeights, IDS),
    Entry(WeightNorm, X),
    Entry(NormWithoutAffine, X),
    Entry(
        EmbeddingBag,
        IDS,
        refused=(
            "nn.EmbeddingBag at `idioms.py:",
            "use nn.Embedding",
        ),
    ),
    Entry(PaddingIndex, IDS),
    Entry(OneHot, IDS),
    Entry(
        Distances,
        X,
        refused=(
            "the operator aten._cdist_forward at `idioms.py:",
            "other operators",
        ),
    ),
    Entry(Polynomial, X, refused=("the operator aten.linalg_inv_ex at `idioms.py:",)),
    Entry(
        DivisibleLength,
        FRAMES,
        dims=("batch: {max: 4}", "length: {min: 4, max: 16}"),
        refused=(
            "length=9",
            "x.view(x.shape[0], -1, 4, 8)",
            "narrow the dims",
        ),
    ),
    Entry(
        EvenPairs,
        FRAMES,
        dims=("batch: {max: 4}", "length: {min: 2, max: 12}"),
        refused=(
            "length=5",
            "x[:, ::2] + x[:, 1::2]",
            "narrow the dims",
        ),
    ),
    Entry(
        OddEvenBranch,
        FRAMES,
        dims=LENGTHS,
        refused=(
            "dim 'length' is not dynamic",
            "(x.shape[1] % 2) == 0",
        ),
    ),
    Entry(
        TwoDimsOneSize,
        (FRAMES[0], floats("z", "batch, steps, 8")),
        dims=(*LENGTHS, "steps: {max: 9}"),
        refused=(
            "length=4,steps=5",
            "dims that must be equal need one name",
        ),
    ),
    Entry(Windows, FRAMES, dims=LENGTHS, refused=("dim 'length' is not dynamic", "length: {min: 5}")),
    Entry(SomeWindows, FRAMES, dims=(LENGTHS[0], "length: {min: 5, opt: 6, max: 14}")),
    Entry(BatchMean, X, refused=("rows depend on each other", "serve without batching")),
    Entry(TakesMode, X, refused=("needs the input 'mode'", "functools.partial")),
    Entry(BigTable, (ids("ids", "batch, 5", 16383),)),
)
