"""Tasks with a bad sample: one that always raises, or raises once, or kills; a model that chokes on it.
Or labels that do not fit."""

from __future__ import annotations

import os
import signal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shoal

BAD = 57
_GENERATOR = torch.Generator().manual_seed(2)
_INPUTS = torch.randn(96, 8, generator=_GENERATOR)
_TARGETS = torch.randint(0, 3, (96,), generator=_GENERATOR)


class Samples:
    """Raises at one sample: always, or where `marker` cannot be made any more only the first time."""

    def __init__(self, bad: int | None, marker: str = "", *, kills: bool = False) -> None:
        self._bad = bad
        self._marker = marker
        self._kills = kills

    def __len__(self) -> int:
        return len(_INPUTS)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == self._bad and self._kills:
            os.kill(os.getpid(), signal.SIGKILL)
        if index == self._bad and self._is_due():
            raise ValueError(f"sample {index} is broken")
        return _INPUTS[index], _TARGETS[index]

    def _is_due(self) -> bool:
        if not self._marker:
            return True
        try:
            os.close(os.open(self._marker, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True


class Choosy(nn.Module):
    """Cannot bear the inputs of one sample; BatchNorm cannot bear single ones."""

    def __init__(self, refuses: bool) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 3)
        self._refuses = refuses

    def forward(self, x: Tensor) -> Tensor:
        if self._refuses and bool((x == _INPUTS[BAD]).all(1).any()):
            raise RuntimeError("these inputs are too much")
        return self.last(self.norm(x))


def _loss_of_one(output: Tensor, target: Tensor) -> Tensor:
    """Knows one of the three labels."""
    return F.cross_entropy(output[:, :1], target)


def task(kind: str = "sound", marker: str = "", steps: int = 40) -> shoal.Task:
    return shoal.Task(
        model=lambda: Choosy(kind == "model"),
        loss=_loss_of_one if kind == "labels" else F.cross_entropy,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        train=Samples(BAD if kind in ("always", "once", "deadly") else None, marker, kills=kind == "deadly"),
        batch_size=16,
        epochs=steps,
        max_steps=steps,
    )
