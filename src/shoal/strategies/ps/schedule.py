"""One shard's own view of the learning rate: shards are not always at the same step."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shoal.model.optimizer.kinds import rebuild, settings_of
from shoal.model.replica import Replica


class ShardSchedule:
    """The task's scheduler over an optimizer that has the user's groups and next to no parameters."""

    def __init__(self, replica: Replica) -> None:
        # A schedule may compute in the numbers of what it moves.
        groups = [
            {**settings_of(group), "params": [nn.Parameter(torch.zeros(1, dtype=group["params"][0].dtype))]}
            for group in replica.optimizer.param_groups
        ]
        self._optimizer = rebuild(replica.optimizer, groups)
        self._scheduler = None if replica.task.scheduler is None else replica.task.scheduler(self._optimizer)
        self._by_loss = isinstance(self._scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
        self._steps = 0
        """How often it has advanced."""
        if self._scheduler is not None:
            self._optimizer._opt_called = True  # type: ignore[attr-defined]
        for loss in replica.start.losses:
            self.advance(loss)

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
        self._steps += 1
        if self._by_loss:
            self._scheduler.step(loss)
        else:
            self._scheduler.step()

    def facts(self) -> dict[str, Any]:
        """What another copy must know to go on as this one would, as plain data."""
        if not self._by_loss:
            return {"steps": self._steps}
        assert self._scheduler is not None
        rates = [float(group["lr"]) for group in self._optimizer.param_groups]
        return {"steps": self._steps, "plateau": self._scheduler.state_dict(), "rates": rates}

    def catch_up(self, facts: dict[str, Any]) -> None:
        """Become what a copy is that has come further."""
        if not self._by_loss:
            for _ in range(self._steps, facts["steps"]):
                self.advance(0.0)
            return
        assert self._scheduler is not None
        self._steps = facts["steps"]
        self._scheduler.load_state_dict(facts["plateau"])
        for group, rate in zip(self._optimizer.param_groups, facts["rates"], strict=True):
            group["lr"] = rate
