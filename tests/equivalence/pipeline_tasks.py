"""Tasks for pipelines: what they refuse, what changes in place across a cut, and how much a worker holds."""

from __future__ import annotations

import gc
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import shoal


def _task(model: Any, inputs: Tensor, steps: int, **fields: Any) -> shoal.Task:
    return shoal.Task(
        model=model,
        optimizer=fields.pop("optimizer", lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9)),
        train=TensorDataset(inputs, torch.arange(len(inputs)) % 4),
        batch_size=16,
        epochs=100,
        max_steps=steps,
        **{"loss": F.cross_entropy, **fields},
    )


def _drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(7))


class Block(nn.Module):
    """Changes in place what a cut may fall before: its own output, and what came over a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)
        self.shortcut = nn.Conv2d(channels, channels, 1)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(self.conv(x))
        out += self.shortcut(x)
        return self.relu(out)


def residual(steps: int) -> shoal.Task:
    def model() -> nn.Module:
        head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4))
        return nn.Sequential(nn.Conv2d(3, 4, 3), Block(4), Block(4), head)

    return _task(model, _drawn(40, 3, 6, 6), steps)


def with_objective(steps: int) -> shoal.Task:
    task = _task(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)), _drawn(40, 4), steps)
    return replace(task, loss=None, objective=lambda model, batch: model(batch[0]).square().mean())


def diverging() -> shoal.Task:
    return _task(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), _drawn(40, 4) * float("nan"), 2)


class Weighing(torch.optim.AdamW):
    """Notes what all tensors of its process hold when parameters, gradients and its own state are all there."""

    folder: Path

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            assert all(p.grad is not None for p in group["params"])
        storages = {
            each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
            for each in gc.get_objects()
            if type(each) in (Tensor, nn.Parameter) and each.device.type == "cpu"
        }
        (self.folder / str(os.getpid())).write_text(str(sum(storages.values())))
        return super().step(closure)


def weighed(folder: str) -> shoal.Task:
    """Eight equal layers, and a batch that weighs nothing beside them."""

    class Here(Weighing):
        pass

    Here.folder = Path(folder)

    def model() -> nn.Module:
        return nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(384, 384), nn.ReLU())))

    return _task(model, _drawn(40, 384), 3, optimizer=lambda params: Here(params, lr=1e-3))
