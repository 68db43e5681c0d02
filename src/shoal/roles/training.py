"""The training loop: the same for every strategy, and for a process that joins in the middle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from shoal.errors import TaskError
from shoal.ledger import Order, Schedule
from shoal.roles.evaluation import Evaluator
from shoal.roles.feed import Feed
from shoal.spec import Task, World
from shoal.strategies.base import Extent, Setting, StepResult, Strategy, Work
from shoal.strategies.replica import Replica


class Observer(Protocol):
    """Who wants to know how the run goes, and may ask it to stop."""

    def on_state(self, state: str, step: int) -> None: ...

    def on_step(self, step: int, result: StepResult, samples: int, learning_rate: float, epoch: int) -> None: ...

    def on_evaluation(self, step: int, results: dict[str, float]) -> None: ...

    def wants_stop(self) -> bool: ...


@dataclass(frozen=True)
class Outcome:
    """How a training run ended, the same on every worker."""

    step: int
    loss: float
    results: dict[str, float]
    reason: str
    """`finished`, `plateau` or `stopped`."""


def make_schedule(task: Task, length: int, slots: int, workers: int) -> Schedule:
    """The steps of a task on so many samples, each cut into slots."""
    batch_size = task.batch_size * (workers if task.batch_per_worker else 1)
    if batch_size < slots:
        raise TaskError(
            f"Task: batch_size={batch_size} is smaller than the {slots} parts that {workers} "
            "workers take; use a larger batch_size or fewer workers."
        )
    order = Order(length, task.seed, shuffle=task.shuffle)
    return Schedule(length, batch_size, slots, task.epochs, task.max_steps, order)


class Training:
    """One process's part in training a task."""

    def __init__(
        self, task: Task, strategy: Strategy, world: World, slots: int, *, numerics: str = "task"
    ) -> None:
        self.task = task
        self.world = world
        train = task.dataset("train")
        self.schedule = make_schedule(task, len(train), slots, world.world_size)
        order = self.schedule.order
        self._feed = Feed(task, train, numerics=numerics, device=world.device)
        sample_feed = Feed(task, train, numerics=numerics)  # models are made on the CPU, whatever they train on
        self.replica = Replica(
            task, numerics=numerics, device=world.device, sample=lambda: sample_feed.batch(order.samples(0, 0, 1))
        )
        self.strategy = strategy
        self.evaluator: Evaluator | None = None
        if task.test is not None:
            test = task.dataset("test")
            self.evaluator = Evaluator(
                task, self.replica, len(test), Feed(task, test, numerics=numerics, device=world.device)
            )
        self.slots = slots

    @property
    def extent(self) -> Extent:
        """What the strategy must make room for."""
        evaluator = self.evaluator
        return Extent(
            total_steps=self.schedule.total_steps,
            tables=max(2, -(-self.schedule.total_steps // self.evaluation_interval)),
            table_rows=evaluator.num_batches if evaluator else 0,
            table_columns=evaluator.num_columns if evaluator else 0,
            accumulate=self.task.accumulate,
            smallest_batch=self.schedule.smallest_batch,
        )

    def work(self, step: int, slots: range, *, stop: bool = False, apart: bool = False) -> Work:
        """This step's part for a process that fills these slots; `apart`: each is a batch of its own."""

        def parts(chosen: range) -> tuple[Any, ...]:
            cuts = self.schedule.cuts(step, chosen)
            return tuple(self._feed.part(cut.alone() if apart else cut, self.task.seed, step) for cut in cuts)

        return Work(step, parts(slots), self.task.seed, stop, lambda: parts(range(self.slots)))

    def warm_up(self, slots: range) -> None:
        """Run a forward and backward pass for nothing, so that the first real one is quick."""
        from shoal.strategies.gradients import backward_part

        self.replica.train_mode()
        work = self.work(1, slots)
        backward_part(self.replica, work, work.parts[0])
        self.replica.module.zero_grad(set_to_none=True)

    def run(self, setting: Setting, observer: Observer, committed: int = 0) -> Outcome:
        """Train until the end. Steps up to `committed` were taken before this process came: only replayed."""
        self.replica.train_mode()
        slots = setting.slots_of(self.world.global_rank)
        losses = self.strategy.losses(committed)
        history: dict[str, list[float]] = {}
        results: dict[str, float] = {}
        result = StepResult(float("nan"), 0.0, False)
        for step in range(1, self.schedule.total_steps + 1):
            if step <= committed:
                result = StepResult(losses[step - 1], 0.0, False)
            else:
                result = self.strategy.step(self.work(step, slots, stop=observer.wants_stop()))
                observer.on_step(
                    step,
                    result,
                    self.schedule.samples_after(step),
                    self.replica.learning_rate,
                    self.schedule.epoch_of(step),
                )
            self.replica.advance(result.loss)
            if self.evaluates_after(step) and self.evaluator is not None:
                results = self._evaluate(step, observer, told=step < committed)
                for name, value in results.items():
                    history.setdefault(name, []).append(value)
                if self.task.stop is not None and self.task.stop.reached(history[self.task.stop.metric]):
                    return Outcome(step, result.loss, results, "plateau")
            if result.stop:
                return Outcome(step, result.loss, results, "stopped")
        return Outcome(self.schedule.total_steps, result.loss, results, "finished")

    def evaluates_after(self, step: int) -> bool:
        """Whether the model is evaluated once this step is committed."""
        return step % self.evaluation_interval == 0 or step == self.schedule.total_steps

    @property
    def evaluation_interval(self) -> int:
        """Steps from one evaluation to the next."""
        return self.task.evaluate_every or self.schedule.steps_per_epoch

    def _evaluate(self, step: int, observer: Observer, *, told: bool) -> dict[str, float]:
        assert self.evaluator is not None
        observer.on_state("evaluating", step)
        results = self.evaluator.run(self.strategy, self.world)
        observer.on_state("training", step)
        if not told:
            observer.on_evaluation(step, results)
        return results
