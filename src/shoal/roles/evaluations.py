"""The evaluations of a run: after which steps, what they came to, and whether that is good enough."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from shoal.roles.observer import Observer
from shoal.roles.training import Training


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
        for _, results in sorted(training.replica.start.evaluations.items()):
            self._note(results)

    @property
    def is_for_all(self) -> bool:
        """Whether the first worker evaluates for all, and has to tell them what follows from it."""
        return self._training.conduct.first_evaluates

    def is_between(self, before: int, step: int) -> bool:
        """Whether there is one once this step is done, where that one was done before."""
        return any(True for _ in self._after(before + 1, step))

    def _after(self, first: int, last: int) -> Iterator[int]:
        """The steps among these after which this process evaluates."""
        training, total = self._training, self._training.schedule.total_steps
        if training.evaluator is None or (self.is_for_all and not training.world.is_first):
            return
        interval = training.evaluation_interval
        yield from range(-(-first // interval) * interval, last + 1, interval)
        if first <= total <= last and total % interval:
            yield total

    def make(self, step: int, *, told: bool = False) -> None:
        """Evaluate after this step; `told`: others have said what it comes to."""
        training, observer, evaluator = self._training, self._observer, self._training.evaluator
        assert evaluator is not None
        observer.on_state("evaluating", step)
        results = self._despite_moves(lambda: evaluator.run(training.strategy, training.world))
        observer.on_state("training", step)
        if training.checkpoints is not None:
            training.checkpoints.note_evaluation(step, results)
        if not told:
            observer.on_evaluation(step, results)
        self._note(results)

    def catch_up(self, committed: int) -> None:
        """Know those of the steps that others have committed since this run began."""
        start = self._training.replica.start
        if not self.is_for_all:
            for step in self._after(max(1, start.step), committed):
                if step not in start.evaluations:
                    self.make(step, told=step < committed)

    def _note(self, results: Mapping[str, float]) -> None:
        self.results = dict(results)
        for name, value in results.items():
            self._history.setdefault(name, []).append(value)

    @property
    def enough(self) -> str:
        """Why training may end, as the task says; empty where it may not."""
        stop = self._training.task.stop
        if stop is None or stop.metric not in self._history or not stop.reached(self._history[stop.metric]):
            return ""
        return f"the {stop.metric} no longer gets better"
