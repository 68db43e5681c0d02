"""Tasks whose samples are slow to read, drawn at random, or held by one worker alone."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import shoal


class Slow:
    """Takes a while for each read, and adds noise that Python and numpy draw."""

    def __init__(self, pause_s: float = 0.002) -> None:
        self.pause_s = pause_s

    def __len__(self) -> int:
        return 70

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        time.sleep(self.pause_s / 8)
        noise = random.random() + float(np.random.rand())
        return torch.arange(6.0) * number / 70 + noise, number % 3


class Rows:
    """As a user may write it: tensors, arrays and numbers in dicts and tuples; it never changes."""

    def __len__(self) -> int:
        return 70

    def __getitem__(self, number: int) -> tuple[dict[str, Any], int]:
        generator = torch.Generator().manual_seed(number)
        return {"x": torch.randn(4, generator=generator), "more": (np.float32(number / 70), [number])}, number % 3


class Net(nn.Module):
    """Takes what `Rows` gives."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.last = nn.Sequential(nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))

    def forward(self, x: torch.Tensor, more: Any) -> torch.Tensor:
        number, (again,) = more
        extra = torch.stack([number.float(), again.float() / 70], 1)
        return self.last(self.first(torch.cat([x, extra], 1)))


def make(**fields: Any) -> shoal.Task:
    return shoal.Task(
        **{
            "model": lambda: nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3)),
            "loss": F.cross_entropy,
            "optimizer": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
            "batch_size": 16,
            "epochs": 3,
            **fields,
        }
    )


class Deadly(Slow):
    """Kills the first process beside the training one that reads a certain sample."""

    def __init__(self, marker: str) -> None:
        super().__init__()
        self.marker = Path(marker)
        self.home = os.getpid()

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        if number == 41 and os.getpid() != self.home and not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(number)


def slow(prefetch: int = 8, loaders: int = 0, marker: str = "") -> shoal.Task:
    train = (lambda: Deadly(marker)) if marker else Slow()
    return make(train=train, test=Slow(), prefetch=prefetch, loaders=loaders)


STEP_S = 0.03


class TakesAStep(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(STEP_S)
        return x


def paced() -> shoal.Task:
    """Reading a batch takes 1.5 times as long as a step does."""
    model, train = lambda: nn.Sequential(nn.Linear(6, 3), TakesAStep()), Slow(pause_s=1.5 * STEP_S / 2)
    return make(model=model, train=train, epochs=8, loaders=2)


def as_given(kind: str, folder: str = "") -> shoal.Task:
    """One data set in the forms in which people have it."""
    inputs = np.random.Generator(np.random.PCG64(1)).normal(size=(70, 6)).astype(np.float32)
    targets = np.arange(70) % 3
    tensors = TensorDataset(torch.from_numpy(inputs), torch.from_numpy(targets))
    if kind == "mapped":
        np.save(Path(folder) / f"{os.getpid()}.npy", inputs)
        mapped = np.load(Path(folder) / f"{os.getpid()}.npy", mmap_mode="r")
        return make(train=(mapped, targets), test=tensors)
    if kind == "loader":
        loader = DataLoader(tensors, batch_size=16, shuffle=True)
        return make(train=loader, test=DataLoader(tensors, batch_size=5), batch_size=shoal.Task.batch_size)
    return make(train=(inputs, targets) if kind == "arrays" else tensors, test=tensors)


class Numbers:
    """Rows of which each has noise that Python draws, in the order in which they come."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        for number in range(70):
            yield torch.arange(6.0) * number / 70 + random.random(), number % 3


class CountedNumbers(Numbers):
    def __len__(self) -> int:
        return 70


def gone_through(counted: bool, loaders: int = 0) -> shoal.Task:
    """Data that has no index. Of an unknown length are four passes and a half."""
    if counted:
        return make(train=CountedNumbers(), test=CountedNumbers(), loaders=loaders)
    return make(train=Numbers(), epochs=1, max_steps=20, loaders=loaders)


def copied() -> shoal.Task:
    return make(model=Net, train=Rows, test=Rows)


def shipped(holder: str) -> shoal.Task:
    """Only one process may make the data, and it leaves a note that it did."""

    def make_rows() -> Rows:
        with open(holder, "a", encoding="ascii") as note:
            note.write(f"{os.getpid()}\n")
        return Rows()

    return make(model=Net, train=shoal.datasets.Shipped(make_rows), test=shoal.datasets.Shipped(make_rows))


def shipped_oddly() -> shoal.Task:
    def collate(rows: list[object]) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(len(rows), 6), torch.zeros(len(rows), dtype=torch.int64)

    return make(train=shoal.datasets.Shipped(lambda: [object()] * 70), collate=collate)


def shipped_badly() -> shoal.Task:
    class Torn(Rows):
        def __getitem__(self, number: int) -> Any:
            if number == 41:
                raise OSError("disk on fire")
            return super().__getitem__(number)

    return make(model=Net, train=shoal.datasets.Shipped(Torn))
