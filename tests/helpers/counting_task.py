"""A model whose weights count how often each sample was applied, by arithmetic that leaves no room for doubt.

Every sample has a row of its own. The loss falls by one for each number in the rows of its batch, plain SGD's
learning rate undoes the mean over the batch, and both are powers of two: so applying a sample adds exactly one to
each number of its row, and nothing else changes it. A row whose numbers differ was torn.
"""

import os
import time
from pathlib import Path

import torch
from torch import nn

import shoal

SAMPLES, BATCH, WIDTH = 256, 32, 2048


class Paced:
    """Sample numbers. Reading takes its time until the file `hurry` is there, and fails once where `bomb` is."""

    def __init__(self, signs: Path, pause_s: float) -> None:
        self._signs = signs
        self._pause_s = pause_s

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> tuple[int, int]:
        return self.__getitems__([number])[0]

    def __getitems__(self, numbers: list[int]) -> list[tuple[int, int]]:
        if not (self._signs / "hurry").exists():
            time.sleep(self._pause_s)
        try:
            os.unlink(self._signs / "bomb")
        except FileNotFoundError:
            return [(number, number) for number in numbers]
        (self._signs / "burst").touch()
        raise RuntimeError("a bomb was found in the data")


def task(signs: str = ".", epochs: int = 1, pause_s: float = 0.0) -> shoal.Task:
    def make() -> nn.Module:
        counts = nn.Embedding(SAMPLES, WIDTH)
        nn.init.zeros_(counts.weight)
        return counts

    most = float(WIDTH * epochs * 8)
    return shoal.Task(
        model=make,
        loss=lambda rows, _: (most - rows.sum(1)).mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=float(BATCH)),
        train=Paced(Path(signs), pause_s),
        batch_size=BATCH,
        epochs=epochs,
        prefetch=0,
    )
