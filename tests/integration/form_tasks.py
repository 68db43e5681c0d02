"""Tasks for forms of a step."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import shoal


class Words(nn.Module):
    """A vocabulary that is large beside the model; input and output share their weights."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(words, 16)
        self.layer = nn.Linear(16, 16)
        self.head = nn.Linear(16, words, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.layer(self.tokens(tokens))))


def words(vocabulary: int = 2048, steps: int = 12) -> shoal.Task:
    """Next words of sequences that follow a rule."""
    numbers = torch.arange(64)[:, None] * 7 + torch.arange(9)[None, :] * 3
    tokens = numbers % vocabulary
    return shoal.Task(
        model=lambda: Words(vocabulary),
        loss=lambda scores, target: F.cross_entropy(scores.flatten(0, 1), target.flatten()),
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
        train=TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()),
        batch_size=16,
        epochs=10,
        max_steps=steps,
    )


class Asking(nn.Linear):
    """Looks at its values in every pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y * 2.0 if y.sum().item() > 0 else y


def asks_for_values(steps: int = 12) -> shoal.Task:
    """A model that no graph can hold."""
    return shoal.Task(
        model=lambda: Asking(4, 3),
        loss=F.cross_entropy,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        train=TensorDataset(torch.randn(32, 4), torch.arange(32) % 3),
        batch_size=8,
        max_steps=steps,
        epochs=10,
    )


def images(steps: int = 8, samples: int = 44) -> shoal.Task:
    """A small convolutional network with BatchNorm; the last batch of an epoch is smaller than the others."""
    generator = torch.Generator().manual_seed(2)
    pictures = torch.randn(samples, 2, 6, 6, generator=generator)
    return shoal.Task(
        model=lambda: nn.Sequential(
            nn.Conv2d(2, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8, 3),
        ),
        loss=F.cross_entropy,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        train=TensorDataset(pictures, torch.arange(samples) % 3),
        batch_size=16,
        epochs=20,
        max_steps=steps,
    )


def small_images(steps: int = 8) -> shoal.Task:
    """Images that are small where convolutions have many channels."""
    generator = torch.Generator().manual_seed(2)
    pictures = torch.randn(44, 2, 7, 7, generator=generator)
    return shoal.Task(
        model=lambda: nn.Sequential(
            nn.Conv2d(2, 128, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(128, 64, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(64, 3),
        ),
        loss=F.cross_entropy,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        train=TensorDataset(pictures, torch.arange(44) % 3),
        batch_size=16,
        epochs=20,
        max_steps=steps,
    )


def overflow(scores: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A target past the classes asks for a loss that no half-precision gradient can hold."""
    return F.cross_entropy(scores.float(), target % 3) * (1 + (target >= 3).any() * 1e6)


def overflows(optimizer: str = "AdamW", steps: int = 40) -> shoal.Task:
    """One batch of an epoch's six overflows in half precision; the last one is smaller than the others."""
    generator = torch.Generator().manual_seed(2)
    inputs, target = torch.randn(88, 16, generator=generator), torch.arange(88) % 3
    target[40] += 3
    kept = {"momentum": 0.9} if optimizer == "SGD" else {}
    return shoal.Task(
        model=lambda: nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 3)),
        loss=overflow,
        optimizer=lambda params: getattr(torch.optim, optimizer)(params, lr=1e-3, **kept),
        train=TensorDataset(inputs, target),
        batch_size=16,
        epochs=100,
        max_steps=steps,
        clip_norm=1.0,
    )


def heavy(steps: int = 16) -> shoal.Task:
    """Weights whose optimizer keeps much more than a pass does."""
    torch.manual_seed(2)
    return shoal.Task(
        model=lambda: nn.Sequential(nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.Linear(4096, 3)),
        loss=F.cross_entropy,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
        train=TensorDataset(torch.randn(64, 64), torch.arange(64) % 3),
        batch_size=16,
        max_steps=steps,
        epochs=10,
        clip_norm=1.0,
    )


def hungry(steps: int = 4) -> shoal.Task:
    """A pass that needs more than any GPU has."""
    return shoal.Task(
        model=lambda: nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 3)),
        loss=lambda scores, target: F.cross_entropy(scores, target) + scores.new_ones(1 << 42)[0],
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
        train=TensorDataset(torch.randn(64, 4), torch.arange(64) % 3),
        batch_size=16,
        max_steps=steps,
        epochs=10,
    )
