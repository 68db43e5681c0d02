"""Models of images."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from zoo_data import CLASSES, SAMPLES, SIDE, adamw, classes_of, images, task

import shoal

IGNORED = 255


def convolutions(norm: type[nn.Module], *arguments: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False),
        norm(*arguments, 8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, padding=1, bias=False),
        norm(*arguments, 8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8 * (SIDE // 2) ** 2, CLASSES),
    )


def batch_norm() -> shoal.Task:
    inputs = images()
    return task(lambda: convolutions(nn.BatchNorm2d), inputs, classes_of(inputs))


def group_norm() -> shoal.Task:
    inputs = images()
    return task(lambda: convolutions(nn.GroupNorm, 2), inputs, classes_of(inputs), clip_norm=1.0)


class InvertedResidual(nn.Module):
    """Wide inside, where every channel is for itself."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        inner = 2 * channels
        self.layers = nn.Sequential(
            nn.Conv2d(channels, inner, 1),
            nn.ReLU6(),
            nn.Conv2d(inner, inner, 3, padding=1, groups=inner),
            nn.ReLU6(),
            nn.Conv2d(inner, channels, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


def depthwise() -> shoal.Task:
    def model() -> nn.Module:
        first, blocks = nn.Conv2d(1, 6, 3, padding=1), [InvertedResidual(6) for _ in range(2)]
        return nn.Sequential(first, *blocks, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(24, CLASSES))

    inputs = images()
    return task(model, inputs, classes_of(inputs), optimizer=adamw)


class Augmented:
    """Turned over by chance, and noisy."""

    def __init__(self) -> None:
        self.inputs = images()
        self.targets = classes_of(self.inputs)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        image = self.inputs[number]
        if torch.rand(()) < 0.5:
            image = image.flip(-1)
        return image + 0.1 * torch.randn_like(image), self.targets[number]


def augmented() -> shoal.Task:
    return task(lambda: convolutions(nn.GroupNorm, 2), train=Augmented)


def autoencoder() -> shoal.Task:
    """The target is the input."""

    def model() -> nn.Module:
        down = [
            nn.Conv2d(1, 8, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(8, 4, 3, stride=2, padding=1),
            nn.Tanh(),
        ]
        up = [nn.ConvTranspose2d(4, 8, 2, stride=2), nn.ReLU(), nn.ConvTranspose2d(8, 1, 2, stride=2)]
        return nn.Sequential(*down, *up)

    inputs = images()
    return task(model, inputs, inputs, loss=F.mse_loss, optimizer=adamw)


class Variational(nn.Module):
    """Draws what it decodes while it trains."""

    def __init__(self, code: int = 4) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(SIDE**2, 24), nn.ReLU())
        self.middle = nn.Linear(24, code)
        self.spread = nn.Linear(24, code)
        self.decoder = nn.Sequential(nn.Linear(code, 24), nn.ReLU(), nn.Linear(24, SIDE**2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        seen = self.encoder(x)
        middle, spread = self.middle(seen), self.spread(seen)
        code = middle + torch.randn_like(middle) * torch.exp(0.5 * spread) if self.training else middle
        return self.decoder(code).view_as(x), middle, spread


def variational() -> shoal.Task:
    """Its loss has two parts, which are told."""

    def objective(model: nn.Module, batch: tuple[Tensor]) -> dict[str, Tensor]:
        made, middle, spread = model(batch[0])
        rebuilt = F.mse_loss(made, batch[0])
        divergence = -0.5 * (1 + spread - middle.square() - spread.exp()).sum(1).mean()
        return {"loss": rebuilt + 0.1 * divergence, "rebuilt": rebuilt, "divergence": divergence}

    inputs = images()
    return task(Variational, inputs, objective=objective, optimizer=adamw, test=TensorDataset(inputs))


class UNet(nn.Module):
    """What the way down has seen is used again on the way up."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 6, 3, padding=1)
        self.down = nn.Conv2d(6, 12, 3, stride=2, padding=1)
        self.bottom = nn.Conv2d(12, 12, 3, padding=1)
        self.up = nn.ConvTranspose2d(12, 6, 2, stride=2)
        self.last = nn.Conv2d(12, CLASSES, 1)

    def forward(self, x: Tensor) -> Tensor:
        seen = F.relu(self.first(x))
        low = F.relu(self.bottom(F.relu(self.down(seen))))
        return self.last(torch.cat([self.up(low), seen], 1))


def segments() -> shoal.Task:
    """A class for every pixel, of which some do not count."""
    inputs = images()
    targets = (inputs[:, 0] > 0).long() + (inputs[:, 0] > 1).long()
    targets[torch.rand(targets.shape, generator=torch.Generator().manual_seed(8)) < 0.2] = IGNORED
    return task(UNet, inputs, targets, loss=partial(F.cross_entropy, ignore_index=IGNORED))
