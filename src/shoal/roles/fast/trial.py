"""A few steps of the real model in one form, timed."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median

import torch

from shoal.model.start import Start
from shoal.roles.fast.choice import HOPELESS, StepWay
from shoal.roles.training.training import Training
from shoal.spec import Cluster, Data, Task, World
from shoal.strategies.base import Commit, Company, Setting
from shoal.strategies.data.single import SingleProcess

WARM_STEPS = 5
"""Before anything is timed; with a graph the fourth is captured."""
_BUDGET_S = 1.5
_FEWEST, _MOST = 5, 40


@dataclass(frozen=True)
class FirstSteps:
    """What the first steps came to."""

    losses: list[float]
    first_s: float


class FormTrial:
    """One way to compute steps, with a model of its own."""

    def __init__(self, task: Task, way: StepWay, device: str, start: Start) -> None:
        """`task`: with the batch of one slot."""
        world, conduct = World(device=device), Data().conduct(Cluster())
        self._device = device
        self._strategy = SingleProcess()
        self.training = Training(
            task,
            self._strategy,
            world,
            conduct,
            start=Start(model=start.model, optimizer=start.optimizer),
            precision=way.precision,
            form=way.form,
        )
        quiet = Company(report=lambda text: None, warn=lambda text: None)
        setting = Setting(world=world, conduct=conduct, company=quiet, clip_norm=task.clip_norm)
        self._strategy.open(self.training.replica, setting)
        self.training.replica.train_mode()
        self._step = 0

    def begin(self, limit_s: float | None = None) -> FirstSteps | None:
        """The first steps; None where a step takes longer than the limit, so that there is no hope."""
        begun = time.perf_counter()
        losses = [self.take().result().loss]
        first_s = time.perf_counter() - begun
        for number in range(1, WARM_STEPS):
            begun = time.perf_counter()
            losses.append(self.take().result().loss)
            took_s = time.perf_counter() - begun
            # In the second nothing is compiled or captured; the last one is as all that follow.
            if number in (1, WARM_STEPS - 1) and limit_s is not None and took_s > HOPELESS * limit_s:
                return None
        return FirstSteps(losses, first_s)

    def measure(self, budget_s: float = _BUDGET_S) -> float:
        """Seconds of a step."""
        times: list[float] = []
        until = time.perf_counter() + budget_s
        while len(times) < _FEWEST or (time.perf_counter() < until and len(times) < _MOST):
            times.append(self._block())
        return median(times)

    def _block(self) -> float:
        """A step on a CPU; on a GPU several, for which it is waited once."""
        if self._device == "cpu":
            begun = time.perf_counter()
            self.take().result()
            return time.perf_counter() - begun
        torch.cuda.synchronize()
        begun, number = time.perf_counter(), 4
        opened = [self.take() for _ in range(number)]
        for each in opened:
            each.result()
        torch.cuda.synchronize()
        return (time.perf_counter() - begun) / number

    def take(self) -> Commit:
        """The next step; the task's last one is followed by the first."""
        self._step = self._step % self.training.schedule.total_steps + 1
        return self._strategy.take(self.training.work(self._step, (0,)))

    def close(self) -> None:
        """Let its memory go."""
        self.training.close()
        self._strategy.close()
