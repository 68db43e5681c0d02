"""A task of which one process dies in the middle of a step, always of the same one."""

import os
import signal
from pathlib import Path

import torch
from torch import nn

import shoal


class DeadlyOnce:
    """Kills the process that reads a certain sample first; the marker says what that had read before."""

    def __init__(self, marker: str, deadly: int) -> None:
        generator = torch.Generator().manual_seed(5)
        self._inputs = torch.randn(240, 16, generator=generator)
        self._targets = self._inputs[:, :4].argmax(1)
        self._marker, self._deadly = Path(marker), deadly
        self._read = 0

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        if number == self._deadly and not self._marker.exists():
            self._marker.write_text(str(self._read))
            os.kill(os.getpid(), signal.SIGKILL)
        self._read += 1
        return self._inputs[number], self._targets[number]


def dying(marker: str, deadly: int = -1, steps: int = 80) -> shoal.Task:
    return shoal.Task(
        model=lambda: nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 4)),
        loss=nn.functional.cross_entropy,
        optimizer=lambda params: torch.optim.AdamW(params, lr=3e-3),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.9),
        train=DeadlyOnce(marker, deadly),
        batch_size=12,
        epochs=100,
        max_steps=steps,
        prefetch=0,
    )
