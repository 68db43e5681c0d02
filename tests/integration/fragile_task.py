"""A model that kills its process when it first sees certain samples."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import shoal

BATCH, COUNT = 4, 60
KILLS = (5, 23, 24, 41)


def inputs() -> Tensor:
    """The samples by number; those with a minus are fatal once."""
    numbers = torch.arange(float(COUNT))
    numbers[list(KILLS)] *= -1
    return torch.stack([numbers, torch.ones(COUNT)], dim=1)


class Fragile(nn.Linear):
    """Leaves a mark for each death, which the next process heeds unless it is to die, too."""

    def __init__(self, marks: str, *, always: bool) -> None:
        super().__init__(2, 1, bias=False)
        self._marks = Path(marks)
        self._always = always

    def forward(self, input: Tensor) -> Tensor:
        for number in input[:, 0].tolist():
            mark = self._marks / str(-int(number))
            if number < 0 and (self._always or not mark.exists()):
                mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(input)


def task(marks: str, always: bool = False) -> shoal.Task:
    return shoal.Task(
        model=lambda: Fragile(marks, always=always),
        loss=nn.functional.mse_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        train=TensorDataset(torch.ones(8, 2), torch.zeros(8, 1)),
        batch_size=BATCH,
    )
