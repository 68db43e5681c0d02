"""A task in this process alone, as a client trains it and a server tries it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from shoal.errors import TaskError
from shoal.model.buffers import moving_buffers
from shoal.roles.loading.task import load_task
from shoal.roles.training.training import Training
from shoal.spec import Cluster, Data, Job, Task, World
from shoal.strategies.base import Setting
from shoal.strategies.data.single import SingleProcess

_FOR_EVER = 1 << 40
"""Epochs: how long it goes on is the server's to say."""
_OF_RUNS = ("callbacks", "ema", "swa", "best_by", "stop", "skip_loss_below")
"""What belongs to a run from its beginning to its end, which a client does not see."""


@dataclass(frozen=True, kw_only=True)
class LoneTraining:
    """Its model, data and steps."""

    training: Training
    strategy: SingleProcess
    world: World

    @classmethod
    def of(cls, target: str, args: Mapping[str, Any], folder: Path) -> LoneTraining:
        """`folder`: for what metrics over all outputs read."""
        task = _for_ever(load_task(Job(target=target, args=dict(args))), target)
        world, conduct = World(sockets=str(folder)), Data().conduct(Cluster(workers=1))
        strategy = SingleProcess()
        training = Training(task, strategy, world, conduct)
        if any(True for _ in moving_buffers(training.replica.module)):
            raise TaskError(
                f"{target}: clients bring how far parameters have come, but the model has buffers that move "
                "(BatchNorm's statistics, or counts), which are no parameters; use layers without, as GroupNorm."
            )
        setting = Setting(
            world=world, conduct=conduct, extent=training.extent, supply=training, clip_norm=task.clip_norm
        )
        strategy.open(training.replica, setting)
        training.replica.train_mode()
        return cls(training=training, strategy=strategy, world=world)

    @torch.no_grad()
    def begin_with(self, values: Mapping[str, torch.Tensor]) -> None:
        """Give the model these parameters."""
        for name, param in self.training.replica.trained.items():
            param.copy_(values[name])

    @torch.no_grad()
    def moved_from(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """How far the model has come from these parameters."""
        return {name: param - values[name] for name, param in self.training.replica.trained.items()}

    def take_steps(self, first: int, count: int) -> int:
        """So many, with an optimizer that knows nothing yet; the samples that were used."""
        replica, used = self.training.replica, 0
        replica.optimizer.state.clear()
        for step in range(first, first + count):
            result = self.strategy.take(self.training.work(step, (0,))).result()
            replica.advance(result.loss)
            used += sum(result.counts)
        return used

    def evaluate(self) -> dict[str, float]:
        """Loss and metrics on the test set; nothing where there is none."""
        evaluator = self.training.evaluator
        return {} if evaluator is None else evaluator.run(self.strategy, self.world)


def _for_ever(task: Task, target: str) -> Task:
    for name in _OF_RUNS:
        if getattr(task, name):
            raise TaskError(f"{target}: {name} is for a whole run, but a client has a part of one; leave it out.")
    return replace(task, epochs=_FOR_EVER, max_steps=None, evaluate_every=None)
