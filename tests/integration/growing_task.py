"""A data set that grows, and notes which of its samples were read."""

from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

import shoal
from shoal.spec import Weighted


class Noted(Dataset):
    """Points on a line, each read noted in a file."""

    def __init__(self, count: int, notes: str) -> None:
        self._count = count
        self._notes = notes

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self._notes:
            with Path(self._notes).open("a") as file:
                file.write(f"{number}\n")
        return torch.tensor([number / 100]), torch.tensor([number / 50])


def task(count: int = 96, notes: str = "", by_weight: bool = False, width: int = 1) -> shoal.Task:
    return shoal.Task(
        model=lambda: nn.Linear(1, width),
        loss=nn.functional.mse_loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=0.01),
        train=Noted(count, notes),
        batch_size=8,
        epochs=1,
        prefetch=0,
        sampler=Weighted([1.0] * count) if by_weight else None,
    )
