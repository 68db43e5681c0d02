"""A task whose workers write down how much memory they use."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import shoal

_EVERY_S = 0.002


def own_bytes() -> int:
    """Memory of this process alone that is no file's."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:"))


class Watch:
    """Looks at this process's memory again and again; its growth is told whenever a loss is computed, so that
    nothing counts that happens after the last step."""

    def __init__(self, folder: str) -> None:
        self._before = self._most = own_bytes()
        self._file = Path(folder) / str(os.getpid())
        threading.Thread(target=self._look, daemon=True).start()

    def _look(self) -> None:
        pause = threading.Event()
        while not pause.wait(_EVERY_S):
            self._most = max(self._most, own_bytes())

    def tell(self) -> None:
        self._file.write_text(str(self._most - self._before), encoding="ascii")


def wide(folder: str, width: int = 1024, blocks: int = 8) -> shoal.Task:
    watches: list[Watch] = []

    def model() -> nn.Module:
        watches.append(Watch(folder))
        layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(blocks)]
        return nn.Sequential(*layers, nn.Linear(width, 10))

    def loss(scores: Tensor, target: Tensor) -> Tensor:
        watches[0].tell()
        return F.cross_entropy(scores, target)

    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(64, width, generator=generator)
    return shoal.Task(
        model=model,
        loss=loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4),
        train=TensorDataset(inputs, torch.randint(0, 10, (64,), generator=generator)),
        batch_size=16,
        epochs=100,
        max_steps=4,
    )
