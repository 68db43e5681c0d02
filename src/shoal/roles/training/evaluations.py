"""The evaluations of a run: after which steps, what they came to, and whether that is good enough."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Protocol

from torch.optim import Optimizer

from shoal.model.optimizer.averaging import average_in_use
from shoal.model.optimizer.kinds import ELEMENTWISE
from shoal.observe.told_marks import Mark
from shoal.roles.training.observer import Observer
from shoal.roles.training.training import Training
from shoal.spec import Conduct, Task
from shoal.spec.vocabulary import State


def has_average(task: Task, conduct: Conduct, optimizer: Optimizer) -> bool:
    """Whether every worker can look at an average of all parameters: the model is whole, and what the optimizer
    keeps is in memory that all share, or the same in each."""
    is_kept = task.ema is not None or task.swa is not None
    is_elsewhere = conduct.is_cut or conduct.gathers or conduct.servers > 0
    return is_kept and type(optimizer) in ELEMENTWISE and not is_elsewhere


class _Despite(Protocol):
    """Does something again where it was left because places came to this process."""

    def __call__(self, act: Callable[[], dict[str, float]], /) -> dict[str, float]: ...


class Evaluations:
    """What one process has a part in. Past ones, of those who trained before it, count as its own."""

    def __init__(self, training: Training, observer: Observer, despite_moves: _Despite) -> None:
        self._training = training
        self._observer = observer
        self._despite_moves = despite_moves
        self._history: dict[str, list[float]] = {}
        self.results: dict[str, float] = {}
        """Of the last one."""
        self.enough = ""
        """Why training may end, as the task says; empty where it may not."""
        self.is_for_all = training.conduct.first_evaluates
        """Whether the first worker evaluates for all, and has to tell them what follows from it."""
        self._tries_average = has_average(training.task, training.conduct, training.replica.optimizer)
        self._callbacks = training.callbacks
        self._last = training.replica.start.step
        """The step after which the last one was, or the run began."""
        self._num_asked = 0
        """How many were asked for, besides those that the task plans, when it was last looked."""
        for _, results in sorted(training.replica.start.evaluations.items()):
            self._note(results)
        self.due = self._first_after(self._last)
        """The step after which the next one is."""

    def look_for_asked(self) -> float:
        """The same, where callbacks may have asked for another."""
        if self._callbacks is not None and self._callbacks.marks[Mark.ASKED] != self._num_asked:
            self.due = self._first_after(self._last)
        return self.due

    def _first_after(self, step: int) -> float:
        """The first step after this one that is followed by an evaluation here."""
        training, total = self._training, self._training.schedule.total_steps
        takes_part = training.world.is_first or not self.is_for_all
        if training.evaluator is None or not takes_part or step >= total:
            return math.inf
        interval = training.evaluation_interval
        return min((step // interval + 1) * interval, total, *self._asked_after(step))

    def _asked_after(self, step: int) -> list[int]:
        if self._callbacks is None:
            return []
        asked = self._callbacks.marks.asked
        self._num_asked = len(asked)
        return [at for at in asked if at > step]

    def make(self, step: int, *, told: bool = False) -> None:
        """Evaluate after this step; `told`: others have said what it comes to."""
        training, observer, evaluator = self._training, self._observer, self._training.evaluator
        assert evaluator is not None
        observer.on_state(State.EVALUATING, step)
        results = self._despite_moves(lambda: evaluator.run(training.strategy, training.world))
        if self._tries_average:
            average = self._despite_moves(self._try_average)
            results |= {f"average_{name}": value for name, value in average.items()}
        observer.on_state(State.TRAINING, step)
        if training.checkpoints is not None:
            training.checkpoints.note_evaluation(step, results)
        if not told:
            observer.on_evaluation(step, results, evaluator.by_client)
        self._note(results)
        self._last, self.due = step, self._first_after(step)
        if self._callbacks is not None:
            self._callbacks.evaluated(step, results)
        if training.best is not None:
            training.best.consider(step, results, is_past=told)

    def _try_average(self) -> dict[str, float]:
        """The same with the average of the parameters over the steps so far."""
        training, evaluator = self._training, self._training.evaluator
        assert evaluator is not None
        with average_in_use(training.replica.trained, training.strategy.state_stream()):
            return evaluator.run(training.strategy, training.world)

    def catch_up(self, committed: int) -> None:
        """Know those of the steps that others have committed since this run began."""
        start = self._training.replica.start
        if self.is_for_all or not committed:
            return
        step = self._first_after(max(0, start.step - 1))
        while step <= committed:
            if step not in start.evaluations:
                self.make(int(step), told=step < committed)
            step = self._first_after(int(step))
        self._last, self.due = committed, step

    def make_up_for(self, last: int) -> None:
        """Where one worker evaluates for all, this one may have come in the place of another, after steps that it
        had no part in. The other one may have died before it had evaluated after the last: that is made up for."""
        training = self._training
        if not self.is_for_all or not training.conduct.is_lockstep:
            return
        self._last, self.due = last - 1, self._first_after(last - 1)
        if self.due == last:
            if self._callbacks is not None:  # a step is told first; what its loss was, nobody knows any more
                self._callbacks.step_is_done(last, math.nan, training.replica.learning_rate)
            self.make(last)

    def _note(self, results: Mapping[str, float]) -> None:
        self.results = dict(results)
        for name, value in results.items():
            self._history.setdefault(name, []).append(value)
        stop = self._training.task.stop
        if stop is not None and stop.metric in self._history and stop.reached(self._history[stop.metric]):
            self.enough = f"the {stop.metric} no longer gets better"
