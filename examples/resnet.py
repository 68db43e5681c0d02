"""ResNet-50, written from its paper (He et al. 2015), on synthetic images of 32 x 32.

    shoal train examples/resnet.py --workers 2
    shoal train examples/resnet.py --workers 2 --strategy pipeline:microbatches=4
    shoal train examples/resnet.py --workers 4 --strategy mesh:data=2,pipeline=2,microbatches=4
    shoal train examples/resnet.py --arg width=8 --arg depths=1-1-1-1 --workers 2 --max-steps 100

Every class has a pattern, and every image is one pattern, moved and covered with noise, so there is something to
learn and nothing to download. Images are made by their number: any process can make any of them.

In a pipeline BatchNorm normalises each micro-batch by itself, as data does each worker's part of a
batch.

Expected: the small network of the last line has a test accuracy of about 0.97 after 100 steps, as it has under
pipeline and mesh, within half a minute on two cores. ResNet-50 itself takes about 5 s for every step there.
"""

import torch
from torch import Tensor, nn

import shoal

EXPANSION = 4
"""A bottleneck's output is so many times as wide as its middle."""
SIDE = 32
CLASSES = 10


class Bottleneck(nn.Module):
    """Three convolutions beside a shortcut: narrow, look around, widen."""

    def __init__(self, channels_in: int, width: int, stride: int) -> None:
        super().__init__()
        channels_out = EXPANSION * width
        self.residual = nn.Sequential(
            *convolution(channels_in, width, 1),
            nn.ReLU(),
            *convolution(width, width, 3, stride),
            nn.ReLU(),
            *convolution(width, channels_out, 1),
        )
        nn.init.zeros_(self.residual[-1].weight)  # at first every block is its shortcut, so that training is calm
        same = stride == 1 and channels_in == channels_out
        self.shortcut = (
            nn.Identity() if same else nn.Sequential(*convolution(channels_in, channels_out, 1, stride))
        )

    def forward(self, x: Tensor) -> Tensor:
        """What is learnt is the difference from the input."""
        return torch.relu(self.shortcut(x) + self.residual(x))


def convolution(channels_in: int, channels_out: int, size: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    """A convolution and its normalisation, which would undo a bias."""
    conv = nn.Conv2d(channels_in, channels_out, size, stride, padding=size // 2, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    return conv, nn.BatchNorm2d(channels_out)


def resnet(width: int, depths: list[int]) -> nn.Sequential:
    """Groups of bottlenecks; each but the first halves the image and doubles the width.

    For small images the first convolution has a kernel of 3 without stride, and no pooling follows it.
    """
    layers: list[nn.Module] = [*convolution(3, width, 3), nn.ReLU()]
    channels = width
    for group, depth in enumerate(depths):
        middle = width << group
        for block in range(depth):
            layers.append(Bottleneck(channels, middle, stride=2 if group and not block else 1))
            channels = EXPANSION * middle
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))


class Patterns:
    """Images of ten classes: each a coarse pattern, shifted at random, under noise."""

    def __init__(self, count: int, first: int = 0) -> None:
        self._count, self._first = count, first
        coarse = torch.randn(CLASSES, 3, 4, 4, generator=torch.Generator().manual_seed(0))
        self._patterns = nn.functional.interpolate(coarse, size=(SIDE, SIDE), mode="bilinear")

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(self._first + index)
        label = int(torch.randint(CLASSES, (), generator=generator))
        down, right = torch.randint(-4, 5, (2,), generator=generator).tolist()
        image = self._patterns[label].roll((down, right), (1, 2))
        return image + torch.randn(image.shape, generator=generator), label


def task(width: int = 64, depths: str = "3-4-6-3", lr: float = 0.05, images: int = 8192) -> shoal.Task:
    """What to train: by default ResNet-50. `width` is that of the first group's middle layers."""
    groups = [int(depth) for depth in depths.split("-")]
    return shoal.Task(
        model=lambda: resnet(width, groups),
        loss=nn.functional.cross_entropy,
        optimizer=lambda params: torch.optim.SGD(params, lr=lr, momentum=0.9, weight_decay=1e-4),
        train=Patterns(images),
        test=Patterns(512, first=images),
        batch_size=64,
        epochs=2,
        metrics={"accuracy": shoal.metrics.accuracy},
    )
