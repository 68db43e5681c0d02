"""Tasks whose samples are cropped at random, and which note who has read what."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal

BATCH = 16
GUARD_S = 60.0


class Cropped:
    """Images of which each read gives another part; notes the process that reads, and its parent."""

    def __init__(self, notes: str, broken: int | None, deadly: int | None) -> None:
        self.notes = Path(notes)
        self.broken, self.deadly = broken, deadly
        self.home = os.getpid()
        self.images = torch.randn(48, 1, 8, 8, generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        with self.notes.open("a") as file:
            file.write(f"{os.getpid()} {os.getppid()} {number}\n")
        if number == self.broken:
            raise ValueError(f"image {number} is broken")
        if number == self.deadly and os.getpid() != self.home:
            os.kill(os.getpid(), signal.SIGKILL)
        top, left = torch.randint(0, 3, (2,)).tolist()
        return self.images[number, :, top : top + 6, left : left + 6], number % 3


def cropped(
    notes: str, steps: int = 6, broken: int | None = None, deadly: int | None = None, patient: bool = False
) -> shoal.Task:
    """`patient`: the first step ends only when samples of later ones have been read."""

    def patient_loss(output: Tensor, target: Tensor) -> Tensor:
        begun = time.monotonic()
        # Not where it is only looked at: before the first step nobody has begun to read.
        while patient and torch.is_grad_enabled() and _num_read_beside(notes) <= BATCH:
            assert time.monotonic() < begun + GUARD_S, "nothing is read while this step computes"
            time.sleep(0.001)
        return F.cross_entropy(output, target)

    return shoal.Task(
        model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 20), nn.ReLU(), nn.Dropout(0.2), nn.Linear(20, 3)),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        train=lambda: Cropped(notes, broken, deadly),
        loss=patient_loss,
        batch_size=BATCH,
        epochs=100,
        max_steps=steps,
    )


def _num_read_beside(notes: str) -> int:
    """Samples that this worker's own processes have read."""
    rows = (line.split() for line in Path(notes).read_text().splitlines())
    return sum(row[1:2] == [str(os.getpid())] for row in rows)
