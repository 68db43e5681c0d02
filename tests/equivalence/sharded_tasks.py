"""Models that do not use their blocks in one order."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import shoal

WIDTH = 64


@dataclass
class Box:
    """Something that nobody knows how to look into."""

    content: Tensor


class Boxed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Box:
        return Box(torch.tanh(self.layer(x)))


class Choosy(nn.Module):
    """The first sample of a part decides which blocks run, and in which order. One runs twice, one is computed
    again in the backward pass, one puts its output into a box, and one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.blocks.append(Boxed())
        self.blocks[3].requires_grad_(False)
        self.last = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        for number in (0, 1, 0, 3) if float(x[0, 0]) > 0 else (2, 3, 1):
            if number == 1:
                h = h + checkpoint(self.blocks[1], h, use_reentrant=False)
            else:
                h = torch.tanh(self.blocks[number](h))
        return self.last(h + self.blocks[4](h).content)


def choosy(steps: int = 6, accumulate: int = 1) -> shoal.Task:
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(70, 8, generator=generator)  # the last batch of an epoch is a small one
    target = torch.randint(0, 4, (70,), generator=generator)
    return shoal.Task(
        model=Choosy,
        loss=F.cross_entropy,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
        train=TensorDataset(inputs, target),
        test=TensorDataset(inputs[:30], target[:30]),
        batch_size=16,
        epochs=100,
        max_steps=steps,
        accumulate=accumulate,
        evaluate_every=2,
    )
