"""Convolutional models: a ResNet, a UNet, a detector, and the layers that upsample and normalise."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.zoo.entry import Entry, floats

IMAGE = floats("pixels", "batch, 3, 24, 24")
ANY_SIZE = ("batch: {max: 3}", "height: {min: 8, opt: 20, max: 40}", "width: {min: 8, opt: 18, max: 33}")


class Block(nn.Module):
    def __init__(self, width_in: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.down = nn.Sequential(nn.Conv2d(width_in, width, 1, stride, bias=False), nn.BatchNorm2d(width))
        for norm in (self.norm1, self.norm2, self.down[1]):
            norm.running_mean.uniform_(-1, 1)
            norm.running_var.uniform_(0.5, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        y += self.down(x)
        return self.relu(y)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 7, 2, 3, bias=False)
        self.norm, self.pool = nn.BatchNorm2d(8), nn.MaxPool2d(3, 2, 1)
        self.layers = nn.Sequential(Block(8, 8, 1), Block(8, 16, 2))
        self.head = nn.Linear(16, 5)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.pool(F.relu(self.norm(self.stem(pixels))))
        return self.head(torch.flatten(F.adaptive_avg_pool2d(self.layers(x), (1, 1)), 1))


class UNet(nn.Module):
    """Any height and width: the skip connection decides the size that is upsampled to."""

    def __init__(self) -> None:
        super().__init__()
        self.enc1, self.enc2 = self._conv(3, 8), self._conv(8, 16)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.dec, self.out = self._conv(16, 8), nn.Conv2d(8, 2, 1)

    def _conv(self, a: int, b: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.GroupNorm(4, b), nn.SiLU())

    def forward(self, pixels: Tensor) -> Tensor:
        skip = self.enc1(pixels)
        deep = self.up(self.enc2(F.max_pool2d(skip, 2)))
        deep = F.interpolate(deep, size=skip.shape[-2:], mode="bilinear", align_corners=False)
        return self.out(self.dec(torch.cat([skip, deep], dim=1)))


class Detector(nn.Module):
    """The three best of all cells, with their boxes: TopK, Gather and Resize."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Conv2d(3, 8, 3, 4, 1)
        self.scores, self.boxes = nn.Conv2d(8, 1, 1), nn.Conv2d(8, 4, 1)

    def forward(self, pixels: Tensor) -> dict[str, Tensor]:
        x = F.interpolate(F.relu(self.features(pixels)), scale_factor=2.0, mode="bilinear")
        scores, index = self.scores(x).sigmoid().flatten(1).topk(3, dim=1)
        boxes = self.boxes(x).flatten(2).transpose(1, 2)
        return {"boxes": boxes.gather(1, index.unsqueeze(-1).expand(-1, -1, 4)), "scores": scores, "index": index}


class NonZeroDetector(Detector):
    """As many rows as cells are found: an output whose size the values decide."""

    def forward(self, pixels: Tensor) -> Tensor:
        scores = self.scores(F.relu(self.features(pixels))).sigmoid()
        return scores[scores > 0.5]


class SuppressingDetector(nn.Module):
    """Non-maximum suppression over a fixed number of boxes, without a Python loop."""

    def forward(self, boxes: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        order = scores.argsort(dim=1, descending=True, stable=True)
        boxes = boxes.gather(1, order.unsqueeze(-1).expand(-1, -1, 4))
        low, high = boxes[..., :2], boxes[..., :2] + boxes[..., 2:].abs()
        inner = (torch.minimum(high[:, :, None], high[:, None]) - torch.maximum(low[:, :, None], low[:, None])).clamp(0)
        inter, area = inner.prod(-1), (high - low).prod(-1)
        overlap = inter / (area[:, :, None] + area[:, None] - inter + 1e-6)
        keep = ~(torch.triu(overlap, diagonal=-1).tril(-1) > 0.5).any(-1)
        return boxes, keep


class Bicubic(nn.Module):
    def forward(self, pixels: Tensor) -> Tensor:
        return F.interpolate(pixels, scale_factor=2.0, mode="bicubic", align_corners=False)


class GridSample(nn.Module):
    def forward(self, pixels: Tensor, grid: Tensor) -> Tensor:
        return F.grid_sample(pixels, grid, align_corners=False)


class PixelShuffle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 12, 3, padding=1, padding_mode="reflect")

    def forward(self, pixels: Tensor) -> Tensor:
        return F.pixel_shuffle(self.conv(pixels), 2)


class AdaptivePool(nn.Module):
    """Pools to 3x3 whatever comes in: where the size is not a multiple, the windows differ."""

    def forward(self, pixels: Tensor) -> Tensor:
        return F.adaptive_avg_pool2d(pixels, (3, 3))


class CeilPool(nn.Module):
    def forward(self, pixels: Tensor) -> Tensor:
        return F.max_pool2d(pixels, 3, 2, ceil_mode=True) + F.avg_pool2d(pixels, 3, 2, ceil_mode=True)


class Patches(nn.Module):
    """A vision transformer's beginning: patches, a class token and added positions."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 8, 8)
        self.cls, self.pos = nn.Parameter(torch.randn(1, 1, 8)), nn.Parameter(torch.randn(1, 10, 8))

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.patch(pixels).flatten(2).transpose(1, 2)
        return torch.cat([self.cls.expand(x.shape[0], -1, -1), x], 1) + self.pos


class DepthwiseInstanceNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 6, 3, groups=3, dilation=2), nn.InstanceNorm2d(6, affine=True)

    def forward(self, pixels: Tensor) -> Tensor:
        return F.hardswish(self.norm(self.conv(pixels)))


FREE = floats("pixels", "batch, 3, height, width")
ENTRIES = (
    Entry(ResNet, (IMAGE,), ("{name: logits, shape: [batch, 5]}",)),
    Entry(UNet, (FREE,), ("{name: y, shape: [batch, 2, height, width]}",), ANY_SIZE),
    Entry(Detector, (IMAGE,), ("{name: scores}", "{name: boxes}", "{name: index}")),
    Entry(
        NonZeroDetector,
        (IMAGE,),
        ("{name: scores}",),
        refused=(
            "'scores' has the shape",
            "its first axis is not the batch",
            "serve without batching",
        ),
    ),
    Entry(
        SuppressingDetector,
        (floats("boxes", "batch, 6, 4"), floats("scores", "batch, 6")),
        ("{name: b}", "{name: keep}"),
    ),
    Entry(Bicubic, (FREE,), dims=ANY_SIZE),
    Entry(GridSample, (IMAGE, floats("grid", "batch, 5, 5, 2", ", range: [-1.2, 1.2]"))),
    Entry(PixelShuffle, (FREE,), dims=ANY_SIZE),
    Entry(
        AdaptivePool,
        (FREE,),
        dims=ANY_SIZE,
        refused=(
            "adaptive_avg_pool2d to [3, 3] at `vision.py:",
            "where the pooled size varies",
            "pool to 1",
        ),
    ),
    Entry(CeilPool, (FREE,), dims=ANY_SIZE),
    Entry(Patches, (IMAGE,)),
    Entry(DepthwiseInstanceNorm, (IMAGE,)),
)
