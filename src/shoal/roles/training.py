"""The training loop: the same for every strategy, and for a process that joins in the middle."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from shoal.errors import SpecError, TaskError
from shoal.feed.feed import Feed
from shoal.feed.parts import Part
from shoal.feed.shipping import ShippedSet, open_dataset
from shoal.ledger import Cut, Schedule, Sizes, make_order
from shoal.ledger.book import Book
from shoal.ledger.cut_log import CutLog
from shoal.roles.chaos import Sabotage
from shoal.roles.checkpointing import Checkpointing
from shoal.roles.evaluation import Evaluator
from shoal.roles.hosting import MoveOrder, PlacesMoved
from shoal.roles.mean_check import MeanCheck
from shoal.roles.witness import Witness
from shoal.spec import Conduct, Task, World
from shoal.spec.vocabulary import State
from shoal.strategies.base import Extent, Setting, StepResult, Strategy, Work
from shoal.strategies.parking import Parking
from shoal.strategies.replica import Replica
from shoal.strategies.start import Start

T = TypeVar("T")


class Observer(Protocol):
    """Who wants to know how the run goes, and may ask it to stop."""

    def on_state(self, state: State, step: int) -> None: ...

    def on_step(self, step: int, result: StepResult, samples: int, learning_rate: float, epoch: int) -> None: ...

    def on_evaluation(self, step: int, results: dict[str, float]) -> None: ...

    def wants_stop(self) -> bool: ...

    def take_orders(self, *, at_border: bool) -> Iterable[MoveOrder]:
        """Places that come or go now; inside a step they only come."""

    def on_moved(self, order: MoveOrder, world: World | None) -> None:
        """An order has been carried out; None: no place is left to this process."""


@dataclass(frozen=True)
class Outcome:
    """How a training run ended, the same on every worker."""

    step: int
    loss: float
    results: dict[str, float]
    reason: str
    """`finished`, `plateau`, `stopped`, or `released`: others go on without this process."""


def make_schedule(task: Task, train: Any, slots: int, workers: int) -> Schedule:
    """The steps of a task on its train set, each cut into slots."""
    batch_size = task.batch_size * (workers if task.batch_per_worker else 1)
    if batch_size < slots:
        raise TaskError(
            f"Task: batch_size={batch_size} is smaller than the {slots} parts that {workers} "
            "workers take; use a larger batch_size or fewer workers."
        )
    order = make_order(task, train, batch_size)
    return Schedule(order.length, batch_size, slots, task.epochs, task.max_steps, order)


class Training:
    """One process's part in training a task."""

    def __init__(
        self,
        task: Task,
        strategy: Strategy,
        world: World,
        conduct: Conduct,
        *,
        numerics: str = "task",
        start: Start | None = None,
        parking: Parking | None = None,
        precision: str = "fp32",
        recompute: bool = False,
        preprocess: int = 0,
    ) -> None:
        self.task = task
        self.world = world
        self.conduct, slots = conduct, conduct.slots
        train = open_dataset(task, "train", lambda: self.world)
        sets = [train]
        if preprocess and isinstance(train, ShippedSet):
            raise SpecError(
                f"preprocess={preprocess} has processes read the train set beside each worker, but it is Shipped, "
                "and only workers can ask for its samples; leave preprocess out, or let each worker make the set."
            )
        self.schedule = make_schedule(task, train, slots, world.world_size)
        order = self.schedule.order
        # Its processes are forked here: they hold nothing of a model, and few threads run yet.
        self._feed = Feed(task, train, numerics=numerics, device=world.device, processes=preprocess)
        sample_feed = Feed(task, train, numerics=numerics)  # models are made on the CPU, whatever they train on
        self.replica = Replica(
            task,
            numerics=numerics,
            device=world.device,
            sample=lambda: sample_feed.batch(order.samples(0, 0, min(2, order.length))),
            start=start,
            parking=parking,
            precision=precision,
            recompute=recompute,
        )
        self.strategy = strategy
        self.evaluator: Evaluator | None = None
        if task.test is not None:
            test = open_dataset(task, "test", lambda: self.world)
            sets.append(test)
            test_feed = Feed(task, test, numerics=numerics, device=world.device, beside=self._feed)
            self.evaluator = Evaluator(task, self.replica, len(test), test_feed, conduct)
        self._shipped = [each for each in sets if isinstance(each, ShippedSet)]
        self.slots = slots
        self.witness = Witness(self.replica, self._feed.batch)
        self.mean_check: MeanCheck | None = None
        """Who looks whether cutting a batch changes what is trained, where it is cut."""
        self.sabotage: Sabotage | None = None
        """What goes wrong with the parts of a step, where the user asked for faults."""
        self.checkpoints: Checkpointing | None = None
        """Who saves the state after steps, where there is a run folder to save it in."""
        saved = self.replica.start.facts.get("book")
        self.book: Book | None = Book(self.replica.start.step) if saved is None else Book.from_plain(saved)
        """What the slots of all committed steps have used."""
        self._followed = 0
        """Steps of others that the scheduler has seen already."""
        self.recorded_cuts: CutLog | None = None
        """How an earlier run cut its batches, where this one is to repeat it."""

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
            steps_per_epoch=self.schedule.steps_per_epoch,
            batch_size=self.schedule.batch_size,
            smallest_batch=self.schedule.smallest_batch,
        )

    def sample(self) -> Any:
        """A batch as large as a slot's pieces, from the first samples."""
        return self._feed.batch(self.schedule.order.samples(0, 0, self.sample_size))

    @property
    def sample_size(self) -> int:
        """So many samples `sample` has."""
        count = max(1, self.schedule.batch_size // (self.slots * self.task.accumulate))
        return min(count, self.schedule.order.length)

    def work(
        self, step: int, slots: Iterable[int], *, stop: bool = False, save: bool = False, apart: bool = False
    ) -> Work:
        """This step's part for a process that fills these slots; `apart`: each is a batch of its own."""

        sizes = self.sizes(step)

        def parts(chosen: Iterable[int]) -> tuple[Part, ...]:
            return tuple(self._part(cut, step, apart=apart) for cut in self.schedule.cuts(step, chosen, sizes))

        return Work(step, parts(slots), self.task.seed, stop, save, lambda: parts(range(self.slots)))

    def _part(self, cut: Cut, step: int, *, apart: bool) -> Part:
        part = self._feed.part(cut.alone() if apart else cut, self.task.seed, step)
        if self.mean_check is not None:
            part = self.mean_check.watch(part)
        if self.sabotage is not None:
            part = self.sabotage.spoil(part, step)
        return self.witness.watch(part, cut.samples)

    def sizes(self, step: int) -> Sizes | None:
        """Samples of each slot in this step; None: even."""
        if self.recorded_cuts is not None:
            return self.recorded_cuts.at(step)
        handover = self.strategy.handover
        return None if handover is None else handover.sizes(step)

    def foresee(self, coming: Iterable[tuple[int, int]], since: int) -> None:
        """Let the feed load ahead: these steps and slots will be asked for, none of a step before `since`."""
        # Later steps are likely to be cut as this one; what is not is read when it is asked for.
        sizes = self.sizes(since)
        cuts = ((step, cut) for step, slot in coming for cut in self.schedule.cuts(step, (slot,), sizes))
        self._feed.foresee(cuts, self.task.seed, since)

    def close(self) -> None:
        """Nothing more is trained on."""
        for dataset in self._shipped:
            dataset.close()
        self._feed.close()

    def warm_up(self, slots: range) -> None:
        """Run a forward and backward pass for nothing, so that the first real one is quick."""
        from shoal.strategies.gradients import backward_part

        self.replica.train_mode()
        work = self.work(1, slots)
        backward_part(self.replica, work, work.parts[0])
        self.replica.module.zero_grad(set_to_none=True)

    def follow(self) -> None:
        """While this process waits for a place: let the scheduler see what others commit, so that little is left.

        The last step is left for `run`: it may be the one that ended the run.
        """
        handover = self.strategy.handover
        if handover is None or self.replica.scheduler is None:
            return
        if (last := handover.committed() - 1) > self._followed:
            self.replica.advance_over(handover.losses(self._followed + 1, last))
            self._followed = last

    def run(self, setting: Setting, observer: Observer, committed: int = 0) -> Outcome:
        """Train until the end. Steps up to `committed` were taken before this process came: only replayed."""
        self.replica.train_mode()
        committed = max(committed, self.replica.start.step)
        losses, was_stopped = self._read_past(committed)
        history: dict[str, list[float]] = {}
        result = StepResult(float("nan"), 0.0, False)
        # None of the steps before the last committed one has ended the run.
        results = self._replay(losses[: max(0, committed - 1)], history, observer)
        for step in range(max(1, committed), self.schedule.total_steps + 1):
            self.witness.step = step
            if step == committed:
                result = StepResult(losses[step - 1], 0.0, was_stopped)
            else:
                stop = observer.wants_stop()
                if not self._heed(observer, at_border=True):
                    return Outcome(step - 1, result.loss, results, "released")
                result = self._take_step(step, setting, observer, stop=stop)
                if self.book is not None:
                    self.book.commit(step, result.counts, self.sizes(step))
                observer.on_step(
                    step,
                    result,
                    self.schedule.samples_after(step),
                    self.replica.learning_rate,
                    self.schedule.epoch_of(step),
                )
            self.replica.advance(result.loss)
            if self.checkpoints is not None:
                self.checkpoints.note_step(step, result.loss)
            reason = "stopped" if result.stop else "finished" if step == self.schedule.total_steps else ""
            if self.evaluates_after(step) and self.evaluator is not None:
                results = self._evaluate(step, observer, history, told=False)
                if self.task.stop is not None and self.task.stop.reached(history[self.task.stop.metric]):
                    reason = "plateau"
            # Who committed the last step may have died before it was saved.
            if self.checkpoints is not None and (step > committed or reason):
                self._save_if_due(step, self.checkpoints, asked=result.save, is_last=bool(reason))
            if reason:
                return Outcome(step, result.loss, results, reason)
        raise AssertionError("a run has at least one step, and its last ends it")

    def _replay(
        self, losses: Sequence[float], history: dict[str, list[float]], observer: Observer
    ) -> dict[str, float]:
        """Let all that follows the steps see those that were taken before, however many they are; what the last
        evaluation of these came to."""
        results: dict[str, float] = {}
        self.replica.advance_over(losses[self._followed :])
        if self.checkpoints is not None:
            self.checkpoints.note_steps(losses)
        if self.evaluator is not None:
            for step in range(self.evaluation_interval, len(losses) + 1, self.evaluation_interval):
                results = self._evaluate(step, observer, history, told=True)
        return results

    def _read_past(self, committed: int) -> tuple[Sequence[float], bool]:
        """Enter into the book what others of this run have committed; the losses of all steps up to then, and
        whether that was all, on request."""
        first, handover = self.replica.start.step + 1, self.strategy.handover
        if committed < first or handover is None:
            return self.replica.start.losses, False
        past = handover.past(first, committed)
        if self.book is not None:
            self.book.commit_past(first, past.counts, past.sizes)
        return handover.losses(1, committed), past.was_stopped

    def _save_if_due(self, step: int, checkpoints: Checkpointing, *, asked: bool, is_last: bool) -> None:
        """Nobody can go on before this process, which has a part in every step: the state stands still."""
        strategy, is_first = self.strategy, self.world.is_first
        checkpoints.failures = self.world.generation
        gathers = self.conduct.gathers
        is_due = asked if gathers else is_first and checkpoints.is_due(step)
        if not is_due and not (is_last and checkpoints.is_on and (is_first or gathers)):
            return
        with checkpoints.at_the_disk():  # others, too, wait for the one who writes
            model, state = strategy.model_stream(self.replica), strategy.state_stream()
            if not is_first:
                model.drain()
                state.drain()
                checkpoints.note_saved(step)
            elif gathers:
                checkpoints.take(step, model, state)
            else:
                checkpoints.save(step, lambda: dict(model.tensors), lambda: dict(state.tensors))

    def _take_step(self, step: int, setting: Setting, observer: Observer, *, stop: bool) -> StepResult:
        def act() -> StepResult:
            steps, places = range(step, self.schedule.total_steps + 1), self.world.places
            slots = [slot for place in places for slot in setting.slots_at(step, place)]
            coming = ((at, slot) for at in steps for place in places for slot in setting.slots_at(at, place))
            self.foresee(coming, step)
            save = self.world.global_rank == setting.decider(step) and self._wants_save(step)
            return self.strategy.step(self.work(step, slots, stop=stop, save=save))

        return self._despite_moves(observer, act)

    def _wants_save(self, step: int) -> bool:
        """Whether to ask all, in this step, to save after it; only needed where they must do so together."""
        checkpoints = self.checkpoints
        return self.conduct.gathers and checkpoints is not None and checkpoints.is_due(step)

    def _despite_moves(self, observer: Observer, act: Callable[[], T]) -> T:
        """What `act` returns; where it was left because places came to this process, it is done with them, too."""
        while True:
            for dataset in self._shipped:
                dataset.take_post()
            try:
                return act()
            except PlacesMoved:
                self._heed(observer, at_border=False)

    def _heed(self, observer: Observer, *, at_border: bool) -> bool:
        """Host the places that the supervisor orders; whether any are left."""
        for order in observer.take_orders(at_border=at_border):
            world = order.applied_to(self.world)
            if world is not None:
                self.world = world
                assert self.strategy.handover is not None, "places move where one can go on for another"
                self.strategy.handover.reform(world)
            observer.on_moved(order, world)
            if world is None:
                return False
        return True

    def evaluates_after(self, step: int) -> bool:
        """Whether the model is evaluated once this step is committed."""
        return step % self.evaluation_interval == 0 or step == self.schedule.total_steps

    @property
    def evaluation_interval(self) -> int:
        """Steps from one evaluation to the next."""
        return self.task.evaluate_every or self.schedule.steps_per_epoch

    def _evaluate(
        self, step: int, observer: Observer, history: dict[str, list[float]], *, told: bool
    ) -> dict[str, float]:
        if step in self.replica.start.evaluations:
            results = dict(self.replica.start.evaluations[step])
        else:
            results = self._evaluate_now(step, observer, told=told)
        for name, value in results.items():
            history.setdefault(name, []).append(value)
        return results

    def _evaluate_now(self, step: int, observer: Observer, *, told: bool) -> dict[str, float]:
        evaluator = self.evaluator
        assert evaluator is not None
        observer.on_state(State.EVALUATING, step)
        results = self._despite_moves(observer, lambda: evaluator.run(self.strategy, self.world))
        observer.on_state(State.TRAINING, step)
        if self.checkpoints is not None:
            self.checkpoints.note_evaluation(step, results)
        if not told:
            observer.on_evaluation(step, results)
        return results
