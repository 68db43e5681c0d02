"""A process that goes on for another sees the steps before it, however many, and has seen most of them already."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from shoal.roles.trainer.state import Unwatched
from shoal.roles.training.hosting import MoveOrder
from shoal.roles.training.loop import Loop
from shoal.roles.training.training import Training
from shoal.spec import Conduct, Task, World
from shoal.strategies.base import Past, Setting
from shoal.strategies.data.single import SingleProcess

GAMMA = 0.5
STEPS = 8
TASK = Task(
    model=lambda: nn.Linear(2, 2),
    loss=nn.functional.mse_loss,
    optimizer=lambda params: torch.optim.SGD(params, lr=1.0),
    scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=GAMMA),
    train=TensorDataset(torch.zeros(STEPS, 2), torch.zeros(STEPS, 2)),
    batch_size=1,
    epochs=1,
)


@dataclass
class Others:
    """What others have committed."""

    steps: int = 0
    asked: list[int] = field(default_factory=list)
    may_release: bool = True

    def gather(self) -> bool:
        return True

    def reform(self, world: World) -> int:
        return self.steps

    def committed(self) -> int:
        return self.steps

    def losses(self, first: int, last: int) -> list[float]:
        self.asked += range(first, last + 1)
        return [float(step) for step in range(first, last + 1)]

    def sizes(self, step: int) -> None: ...

    def past(self, first: int, last: int) -> Past:
        return Past(np.ones((last - first + 1, 1), dtype=np.int32), None, False)


def make(task: Task = TASK) -> tuple[Training, Others]:
    strategy, others = SingleProcess(), Others()
    strategy.handover = others
    training = Training(task, strategy, World(), Conduct(fills=(range(1),)))
    return training, others


def test_the_learning_rate_follows_and_no_step_is_seen_twice() -> None:
    training, others = make()
    setting = Setting(world=World(), conduct=Conduct(fills=(range(1),)), extent=training.extent)
    loop = Loop(training, setting, Unwatched())
    for others.steps in (0, 1, 4, 4, 6):
        loop.follow()
        seen = max(0, others.steps - 1)  # the last one may have ended the run
        assert training.replica.learning_rate == GAMMA**seen and others.asked == list(range(1, seen + 1))
    training.strategy.open(training.replica, setting)
    outcome = loop.run(committed=6)
    assert outcome.step == STEPS and training.replica.learning_rate == GAMMA**STEPS


class StopsAtOnce(Unwatched):
    def wants_stop(self) -> bool:
        return True


def test_who_ends_before_the_next_evaluation_knows_the_last_one() -> None:
    training, others = make(replace(TASK, test=TASK.train, evaluate_every=3))
    others.steps = 4
    setting = Setting(world=World(), conduct=Conduct(fills=(range(1),)), extent=training.extent)
    training.strategy.open(training.replica, setting)
    outcome = Loop(training, setting, StopsAtOnce()).run(committed=4)
    assert (outcome.step, outcome.reason) == (5, "stopped") and "loss" in outcome.results


def test_without_a_scheduler_nobody_need_be_followed() -> None:
    training, others = make(replace(TASK, scheduler=None))
    others.steps = 5
    Loop(training, Setting(world=World(), conduct=training.conduct), Unwatched()).follow()
    assert others.asked == []


class TellsToLeave(Unwatched):
    """Has an order from the first step on, to be carried out where that may be: after the fifth."""

    def __init__(self, others: Others) -> None:
        self.step = 0
        self._others = others

    def on_step(self, step: int, *told: Any, **besides: Any) -> None:
        self.step, self._others.may_release = step, step == 5

    def take_orders(self, *, at_border: bool) -> tuple[MoveOrder, ...]:
        return (MoveOrder(kind="release", places=(0,), generation=1),) if at_border else ()


def test_places_leave_where_the_strategy_lets_them() -> None:
    training, others = make()
    others.may_release, watcher = False, TellsToLeave(others)
    setting = Setting(world=World(), conduct=Conduct(fills=(range(1),)), extent=training.extent)
    training.strategy.open(training.replica, setting)
    outcome = Loop(training, setting, watcher).run()
    assert (outcome.reason, watcher.step) == ("released", 5)
