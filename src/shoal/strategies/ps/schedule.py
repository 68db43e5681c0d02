"""One shard's own view of the learning rate: shards are not always at the same step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from shoal.strategies.optimizers import rebuild, settings_of
from shoal.strategies.replica import Replica


class ShardSchedule:
    """The task's scheduler over an optimizer that has the user's groups and next to no parameters."""

    def __init__(self, replica: Replica) -> None:
        groups = [
            {**settings_of(group), "params": [nn.Parameter(torch.zeros(1))]}
            for group in replica.optimizer.param_groups
        ]
        self._optimizer = rebuild(replica.optimizer, groups)
        self._scheduler = None if replica.task.scheduler is None else replica.task.scheduler(self._optimizer)
        self._by_loss = isinstance(self._scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        self.advances: list[float] = []
        """The loss of every step so far where the schedule depends on it, else zeros."""
        if self._scheduler is not None:
            self._optimizer._opt_called = True  # type: ignore[attr-defined]
        self.replay(replica.start.losses)

    def settings(self, lr_scale: float) -> list[dict[str, Any]]:
        """By group: the hyper-parameters of the next update."""
        current = [settings_of(group) for group in self._optimizer.param_groups]
        if lr_scale != 1.0:
            for group in current:
                group["lr"] = group["lr"] * lr_scale
        return current

    def advance(self, loss: float) -> None:
        """A step of the whole batch is done."""
        if self._scheduler is None:
            return
        self.advances.append(loss if self._by_loss else 0.0)
        if self._by_loss:
            self._scheduler.step(loss)
        else:
            self._scheduler.step()

    def replay(self, advances: Iterable[float]) -> None:
        """Catch up with a copy that has come further; one that was behind starts anew."""
        for loss in list(advances)[len(self.advances) :]:
            self.advance(loss)
