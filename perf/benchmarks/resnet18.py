"""ResNet-18 in plain torch with seeded weights whose batch norms hold the statistics of its own activations.

No weights are downloaded. A network with random weights and untouched batch norms is no fair model to quantise: its
activations grow or vanish from block to block. Here each batch norm measured what really passes through it, as
training leaves it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

SIZE = 224
# A pixel's range after the usual normalisation; the spec says the same.
LOWEST, HIGHEST = -2.2, 2.7
_STAGES = ((64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1))


class Block(nn.Module):  # type: ignore[misc]
    """Two 3x3 convolutions and the way around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = (
            nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
            if stride > 1 or inputs != outputs
            else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(inner)) + self.downsample(x))


class ResNet18(nn.Module):  # type: ignore[misc]
    """[batch, 3, 224, 224] images to [batch, 1000] logits."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        inputs = [64, *(width for width, _ in _STAGES)]
        self.blocks = nn.Sequential(*(Block(i, o, s) for i, (o, s) in zip(inputs, _STAGES, strict=False)))
        self.head = nn.Linear(512, 1000)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(pixels)).mean((2, 3)))


def images(count: int, seed: int) -> NDArray[np.float32]:
    """Returns [count, 3, 224, 224] normalised pictures: smooth shapes, edges and some noise."""
    rng = np.random.default_rng(seed)
    coarse = torch.from_numpy(rng.standard_normal((count, 3, 14, 14)).astype(np.float32))
    smooth = nn.functional.interpolate(coarse, size=(SIZE, SIZE), mode="bilinear", align_corners=False)
    edges = nn.functional.interpolate(coarse[:, :1].sign(), size=(SIZE, SIZE), mode="nearest")
    noise = torch.from_numpy(rng.standard_normal((count, 3, SIZE, SIZE)).astype(np.float32))
    found: NDArray[np.float32] = (0.8 * smooth + 0.5 * edges + 0.15 * noise).clamp(LOWEST, HIGHEST).numpy()
    return found


def build_resnet18() -> nn.Module:
    """The factory of the benchmark's spec: seeded weights, batch norms with measured statistics."""
    torch.manual_seed(0)
    model = ResNet18()
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None  # the plain mean over the batches
            nn.init.uniform_(module.weight, 0.5, 1.0)
            nn.init.normal_(module.bias, 0.0, 0.1)
    with torch.no_grad():
        for batch in (images(8, 2), _noise(8, 1)):
            model.train()(torch.from_numpy(batch))
    return model.eval()


def samples() -> Iterator[dict[str, NDArray[np.float32]]]:
    """Yields calibration data, image by image: pictures, and what else the spec allows and parity judges.

    A search judges its graphs by a few evenly spread samples: the kinds are spread, too.
    """
    pictures = [image[None] for image in images(12, 10)]
    rare = [np.full((1, 3, SIZE, SIZE), value, dtype=np.float32) for value in (LOWEST, HIGHEST)] + [_noise(1, 14)]
    for position in range(len(pictures) + len(rare)):
        yield {"pixels": (rare if position % 4 == 1 and rare else pictures).pop()}


def _noise(count: int, seed: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).uniform(LOWEST, HIGHEST, (count, 3, SIZE, SIZE)).astype(np.float32)
