"""Small models with branches, and layers that write down when they ran."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import shoal

OPTIMIZERS = {
    "momentum": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=1e-4),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3),
}


def _perceptron(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 24), nn.Tanh(), nn.BatchNorm1d(24), nn.Linear(24, outputs))


class Branched(nn.Module):
    """A stem, two branches, a join, and a head; a scale of its own, and a layer that nobody calls."""

    def __init__(self, join: str) -> None:
        super().__init__()
        self.join = join
        self.stem = nn.Linear(12, 16)
        self.left = _perceptron(16, 10)
        self.right = _perceptron(16, 10)
        self.active = nn.LeakyReLU(inplace=True)
        self.scale = nn.Parameter(torch.ones(10))
        self.head = nn.Linear(20 if join == "cat" else 10, 4)
        self.unused = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.stem(x.flatten(1)))
        left, right = self.left(h), self.active(self.right(h)) * self.scale
        if self.join == "cat":
            joined = torch.cat([left, right], 1)
        else:
            left += right  # in place, on what may have come from another worker
            joined = left
        return self.head(F.dropout(joined, 0.5, self.training))


class Shared(nn.Module):
    """Two branches with one weight, and a branch that returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(12, 12)
        self.right = nn.Linear(12, 12)
        self.right.weight = self.left.weight
        self.memory = nn.GRU(3, 6, batch_first=True)
        self.head = nn.Linear(30, 4)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.memory(x.view(x.size(0), 4, 3))
        return self.head(torch.cat([self.left(x), self.right(x), states[:, -1]], dim=1))


def _classified(count: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(count, 12, generator=generator)
    return TensorDataset(inputs, (inputs[:, :4] + inputs[:, 4:8]).argmax(1))


def branched(model: str = "cat", optimizer: str = "momentum", steps: int = 12, **fields: Any) -> shoal.Task:
    return shoal.Task(
        model=Shared if model == "shared" else lambda: Branched(model),
        loss=F.cross_entropy,
        optimizer=OPTIMIZERS[optimizer],
        train=_classified(70),  # the last batch of an epoch is a small one
        test=_classified(30),
        metrics={"accuracy": shoal.metrics.accuracy},
        batch_size=16,
        epochs=100,
        max_steps=steps,
        clip_norm=0.5,
        scheduler=lambda opt: torch.optim.lr_scheduler.StepLR(opt, 5, 0.5),
        **fields,
    )


class Meeting(nn.Module):
    """A layer whose passes wait until another layer's have begun, too: they end only where both run at once.

    `forward` and `backward` are (own mark, the other's mark). Marks are files with the process's number.
    """

    def __init__(self, layer: nn.Module, folder: str, forward: tuple[str, str], backward: tuple[str, str]) -> None:
        super().__init__()
        self.layer = layer
        self.folder = Path(folder)
        self.marks = {"forward": forward, "backward": backward}
        self.counts = {"forward": 0, "backward": 0}

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return self.layer(x)
        self.meet("forward")
        return _MeetOnTheWayBack.apply(self.layer(x), self)

    def meet(self, what: str) -> None:
        self.counts[what] += 1
        own, other = (self.folder / f"{mark}-{self.counts[what]}" for mark in self.marks[what])
        own.write_text(str(os.getpid()))
        deadline = time.monotonic() + 30
        while not other.exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{own.name} waited in vain for {other.name}")
            time.sleep(0.001)


class _MeetOnTheWayBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Meeting) -> Tensor:
        ctx.layer = layer
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.layer.meet("backward")
        return gradients[0], None


class Overlapping(nn.Module):
    """Branches that meet each other, forward and backward."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        left, right = ("left", "right"), ("right", "left")
        back = {pair: (f"{pair[0]}-back", f"{pair[1]}-back") for pair in (left, right)}
        self.left = Meeting(nn.Linear(12, 8), folder, left, back[left])
        self.right = Meeting(nn.Linear(12, 8), folder, right, back[right])
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([self.left(x), self.right(x)], dim=1))


def processes(folder: Path, mark: str, steps: int) -> set[str]:
    """Who left a mark in every step."""
    return {(folder / f"{mark}-{step}").read_text() for step in range(1, steps + 1)}


def _met(model: Callable[[], nn.Module], steps: int) -> shoal.Task:
    return shoal.Task(
        model=model,
        loss=F.cross_entropy,
        optimizer=OPTIMIZERS["momentum"],
        train=_classified(64),
        batch_size=16,
        max_steps=steps,
    )


def overlapping(folder: str, steps: int = 3) -> shoal.Task:
    return _met(lambda: Overlapping(folder), steps)


def following(folder: str, steps: int = 3) -> shoal.Task:
    """Layers in a line, of which each goes backward while the next one goes forward."""
    first = Meeting(nn.Linear(12, 12), folder, ("start", "start"), ("first-back", "second"))
    second = Meeting(nn.Linear(12, 12), folder, ("second", "first-back"), ("second-back", "last"))
    last = Meeting(nn.Linear(12, 4), folder, ("last", "second-back"), ("end", "end"))
    return _met(lambda: nn.Sequential(first, second, last), steps)


def deep(optimizer: str = "momentum", steps: int = 12) -> shoal.Task:
    """A line of layers, for groups that take turns."""
    return shoal.Task(
        model=lambda: nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)),
        loss=F.cross_entropy,
        optimizer=OPTIMIZERS[optimizer],
        train=_classified(70),
        test=_classified(30),
        metrics={"accuracy": shoal.metrics.accuracy},
        batch_size=16,
        epochs=100,
        max_steps=steps,
    )


def images(optimizer: str = "adamw", steps: int = 12) -> shoal.Task:
    """Convolutions with BatchNorm in a line, for groups with heads of their own."""
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(70, 2, 6, 6, generator=generator)
    return shoal.Task(
        model=lambda: nn.Sequential(
            *(nn.Conv2d(2, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU()),
            *(nn.Conv2d(12, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(72, 8), nn.ReLU(), nn.Linear(8, 4)),
        ),
        loss=F.cross_entropy,
        optimizer=OPTIMIZERS[optimizer],
        train=TensorDataset(inputs, inputs.mean((2, 3)).argmax(1) + 2 * (inputs.mean((1, 2, 3)) > 0)),
        batch_size=16,
        epochs=100,
        max_steps=steps,
        clip_norm=0.5,
        scheduler=lambda opt: torch.optim.lr_scheduler.StepLR(opt, 5, 0.5),
    )


def by_objective() -> shoal.Task:
    return shoal.Task(
        model=lambda: nn.Sequential(nn.Linear(12, 4), nn.Linear(4, 4)),
        objective=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        optimizer=OPTIMIZERS["momentum"],
        train=_classified(64),
        batch_size=16,
        max_steps=2,
    )
