"""A shard's own view of the learning rate is what the task's scheduler says."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LRScheduler

from shoal.strategies.ps.schedule import ShardSchedule


class InNumbersOfWhatItMoves(LRScheduler):
    """As Keras's schedules compute."""

    def get_lr(self) -> list[float | torch.Tensor]:
        dtype = self.optimizer.param_groups[0]["params"][0].dtype
        return [float(torch.tensor(0.1, dtype=dtype) * 0.7**self.last_epoch) for _ in self.optimizer.param_groups]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rates_are_as_precise_as_the_parameters(dtype: torch.dtype) -> None:
    def make() -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros((), dtype=dtype))], lr=0.1)
        return optimizer, InNumbersOfWhatItMoves(optimizer)

    optimizer, scheduler = make()
    task, start = SimpleNamespace(scheduler=InNumbersOfWhatItMoves), SimpleNamespace(losses=[])
    shard = ShardSchedule(SimpleNamespace(optimizer=make()[0], task=task, start=start))  # type: ignore[arg-type]
    for _ in range(3):
        assert shard.settings(1.0)[0]["lr"] == optimizer.param_groups[0]["lr"]
        optimizer.step()
        scheduler.step()
        shard.advance(0.0)
