"""Real models for placement: the example's GPT and a residual net, as parcels."""

from __future__ import annotations

import runpy
from itertools import pairwise
from pathlib import Path

from torch import Tensor, nn

from shoal.layout import Parcel

EXAMPLES = Path(__file__).parents[2] / "examples"


class Residual(nn.Module):
    """Two convolutions with batch normalisation beside a shortcut."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.shortcut = nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm1(self.conv1(x)).relu()
        return (self.norm2(self.conv2(inner)) + self.shortcut(x)).relu()


def resnet() -> nn.Module:
    """25 convolutions on 32 x 32 images, of widths 32 to 256."""
    widths = [32, 32, 32, 64, 64, 128, 128, 256, 256]
    blocks = [Residual(before, after, after // before) for before, after in pairwise(widths)]
    stem = [nn.Conv2d(3, widths[0], 3, padding=1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))


def gpt() -> nn.Module:
    """The example's GPT."""
    model: nn.Module = runpy.run_path(str(EXAMPLES / "gpt.py"))["GPT"](256, 64, 128, 4, 4, 0.1)
    return model


def parcels_of(model: nn.Module) -> list[Parcel]:
    """A model's parameters as placement sees them; a shared one counts once, where it first appears."""
    return [
        Parcel(
            name=name,
            kind=type(model.get_submodule(name.rpartition(".")[0])).__name__,
            numel=param.numel(),
            itemsize=param.element_size(),
        )
        for name, param in model.named_parameters()
    ]
