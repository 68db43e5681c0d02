"""What one process trains with: the task's data, model and schedule, and its strategy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from shoal.datasets import Stream
from shoal.datasets.iterated import ByPosition
from shoal.errors import SpecError, TaskError
from shoal.feed.feed import Feed
from shoal.feed.parts import Part
from shoal.feed.shipping import ShippedSet, open_dataset
from shoal.ledger import Cut, Schedule, Sizes, make_order
from shoal.ledger.book import Book, CutLog
from shoal.ledger.clients import ClientOrder, held_of, split_by_label, split_evenly
from shoal.model.gathering import refuse_from_now_on
from shoal.model.parking.building import Parking
from shoal.model.replica import Replica
from shoal.model.start import Start
from shoal.observe.told_marks import MOST_ASKED
from shoal.roles.callbacks.telling import Callbacks
from shoal.roles.inference.evaluator import Evaluator, Tables
from shoal.roles.inference.tried_batches import ClientBatches
from shoal.roles.loading.weighing import derived_weight
from shoal.roles.training.best import BestKeeper
from shoal.roles.training.chaos import Sabotage
from shoal.roles.training.checkpointing import Checkpointing
from shoal.roles.training.mean_check import MeanCheck
from shoal.roles.training.protection import (
    Protection,
    check_private,
    drawn_schedule,
    make_protection,
    refuse_unprotected,
)
from shoal.roles.training.witness import Witness
from shoal.spec import Conduct, Task, World
from shoal.spec.clients import ClientRounds
from shoal.spec.features import GATHER
from shoal.spec.privacy import Privacy
from shoal.spec.step_form import StepForm
from shoal.step.work import Work
from shoal.strategies.base import Extent, Strategy, handover_of


def make_schedule(
    task: Task, train: Any, slots: int, workers: int, clients: ClientRounds | None = None
) -> Schedule:
    """The steps of a task on its train set, each cut into slots; `clients`: whose samples these take."""
    batch_size = task.batch_size * (workers if task.batch_per_worker else 1)
    if batch_size < slots:
        raise TaskError(
            f"Task: batch_size={batch_size} is smaller than the {slots} parts that {workers} "
            "workers take; use a larger batch_size or fewer workers."
        )
    order = make_order(task, train, batch_size)
    if clients is not None:
        order = _order_of_clients(task, train, batch_size, slots, clients)
    length = order.length // batch_size * batch_size if task.drop_last else order.length
    if not length:
        raise TaskError(
            f"Task: drop_last leaves out an epoch's last batch where it is small, and of {order.length} samples "
            f"none is left at batch_size={batch_size}; use a smaller batch_size."
        )
    return Schedule(length, batch_size, slots, task.epochs, task.max_steps, order)


def _order_of_clients(task: Task, train: Any, batch_size: int, slots: int, clients: ClientRounds) -> ClientOrder:
    if batch_size % slots:
        raise TaskError(
            f"Task: batch_size={batch_size} is that of {slots} clients at a time, which all have one of the same "
            f"size; let it be a multiple of {slots}."
        )
    if task.sampler is not None or isinstance(train, (Stream, ByPosition)):
        what = "a sampler chooses its samples" if task.sampler is not None else "it is read forward only"
        raise TaskError(f"Task: clients take samples of their own in any order, but {what}; leave that out.")
    if clients.held and task.test is None:
        raise TaskError(
            f"Task: held={clients.held:g} has clients evaluated whenever the model is tried on the test set, but "
            "there is none; set test=, or leave held out."
        )
    count = len(train)
    if count < clients.count:
        raise TaskError(
            f"Task: the train set has {count} samples, and {clients.count} clients need one each; use fewer."
        )
    if clients.skew is None:
        parts = split_evenly(count, clients.count, task.seed)
    else:
        labels = np.array([int(train[number][1]) for number in range(count)])
        parts = split_by_label(labels, clients.count, clients.skew, task.seed)
    return ClientOrder(parts, clients, batch_size=batch_size, slots=slots, seed=task.seed)


def _check_readable(task: Task, train: Any, conduct: Conduct, loaders: int) -> None:
    """Refuse a train set that nobody could read as the job asks."""
    if loaders and isinstance(train, ShippedSet):
        raise SpecError(
            f"{'loaders' if task.loaders else 'preprocess'}={loaders} has processes read the train set beside "
            "each worker, but it is Shipped, and only workers can ask for its samples; leave it out, or let "
            "each worker make the set."
        )
    if conduct.is_relay and isinstance(train, ByPosition) and train.length is None:
        raise TaskError(
            "Task: the train set has no length, but in a relay each worker has its share of an epoch's steps; "
            "give it a __len__, or leave partition=relay out."
        )


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
        form: StepForm | None = None,
        privacy: Privacy | None = None,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.task = task
        self.world = world
        self.conduct, slots = conduct, conduct.slots
        train = open_dataset(task, "train", lambda: self.world)
        sets = [train]
        loaders = task.loaders or conduct.preprocess
        _check_readable(task, train, conduct, loaders)
        self.schedule, self.protection = self._plan(train, start or Start(), privacy)
        order = self.schedule.order
        # Its processes are forked here: they hold nothing of a model, and few threads run yet.
        self._feed = Feed(
            task,
            train,
            numerics=numerics,
            device=world.device,
            processes=loaders,
            leaves_small=form is not None and form.graph,
            warn=warn,
        )
        if start is not None:
            start = start.with_members(is_ensemble=conduct.is_ensemble)
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
            form=form,
        )
        self.client_protection = None if self.protection is None else self.protection.protect(self.replica)
        """What the strategy does for the privacy of clients, where they are to have some."""
        self.weighing = derived_weight(self.replica) if self.protection is None else None
        """What a batch counts, where the task leaves that to its loss."""
        if self.weighing is not None:
            self.task = self.replica.task = task = replace(self.replica.task, weight=self.weighing.weight)
            self._feed.weigh_by(self.weighing.weight)
        self.strategy = strategy
        if conduct.cuts_batches and not conduct.meets:
            refuse_from_now_on(lambda: SpecError(GATHER.refusal(task, conduct, "")))
        self.evaluator: Evaluator | None = None
        if task.test is not None:
            test = open_dataset(task, "test", lambda: self.world)
            sets.append(test)
            test_feed = Feed(task, test, numerics=numerics, device=world.device, beside=self._feed)
            clients: ClientBatches | None = None
            if held := held_of(order):
                held_feed = Feed(task, train, numerics=numerics, device=world.device, beside=self._feed)
                clients = ClientBatches(held_feed, held, task.batch_size)
            self.evaluator = Evaluator(task, self.replica, len(test), test_feed, conduct, clients)
        self._shipped = [each for each in sets if isinstance(each, ShippedSet)]
        self.slots = slots
        self.witness = Witness(self.replica, self._feed)
        self.mean_check: MeanCheck | None = None
        """Who looks whether cutting a batch changes what is trained, where it is cut."""
        self.sabotage: Sabotage | None = None
        """What goes wrong with the parts of a step, where the user asked for faults."""
        self.checkpoints: Checkpointing | None = None
        """Who saves the state after steps, where there is a run folder to save it in."""
        self.callbacks: Callbacks | None = None
        """Who tells the task's callbacks what happens, where it has any."""
        self.best: BestKeeper | None = None
        """Who keeps the best model that is evaluated, where the task wants that."""
        saved = self.replica.start.facts.get("book")
        self.book: Book | None = Book(self.replica.start.step) if saved is None else Book.from_plain(saved)
        """What the slots of all committed steps have used."""
        self.recorded_cuts: CutLog | None = None
        """How an earlier run cut its batches, where this one is to repeat it."""

    def _plan(self, train: Any, start: Start, privacy: Privacy | None) -> tuple[Schedule, Protection | None]:
        """The steps of the run, and what is done for the privacy of its data, which may end it early."""
        task, conduct, workers = self.task, self.conduct, self.world.world_size
        if privacy is None:
            refuse_unprotected(start)
            return make_schedule(task, train, conduct.slots, workers, conduct.clients), None
        check_private(task, train)
        if conduct.clients is None:
            schedule = drawn_schedule(task, train, conduct.slots, privacy)
        else:
            schedule = make_schedule(task, train, conduct.slots, workers, conduct.clients)
        protection = make_protection(privacy, schedule, conduct, start, len(train))
        return protection.limited(schedule), protection

    @property
    def extent(self) -> Extent:
        """What the strategy must make room for."""
        evaluator = self.evaluator
        return Extent(
            total_steps=self.schedule.total_steps,
            tables=num_tables(self.task, self.schedule),
            table_rows=evaluator.most_batches if evaluator else 0,
            table_columns=evaluator.tables.columns if evaluator else 0,
            accumulate=self.task.accumulate,
            steps_per_epoch=self.schedule.steps_per_epoch,
            batch_size=self.schedule.batch_size,
            smallest_batch=self.schedule.smallest_batch,
            is_saved=self.checkpoints is not None and self.checkpoints.is_on,
        )

    def sample(self) -> Any:
        """A batch as large as a slot's micro-batches, from the first samples."""
        return self._feed.batch(self.schedule.order.samples(0, 0, self.sample_size))

    @property
    def sample_size(self) -> int:
        """So many samples `sample` has."""
        count = max(1, self.schedule.batch_size // (self.slots * self.task.accumulate))
        return min(count, self.schedule.order.length)

    def work(self, step: int, slots: Iterable[int], *, apart: bool = False, **asked: Any) -> Work:
        """This step's part for a process that fills these slots, and what is `asked` besides; `apart`: each is a
        batch of its own."""
        self.witness.step = step
        sizes = self.sizes(step)

        def parts(chosen: Iterable[int]) -> tuple[Part, ...]:
            return tuple(self._part(cut, step, apart=apart) for cut in self.schedule.cuts(step, chosen, sizes))

        return Work(step, parts(slots), self.task.seed, all_parts=lambda: parts(range(self.slots)), **asked)

    def _part(self, cut: Cut, step: int, *, apart: bool) -> Part:
        part = self._feed.part(cut.alone() if apart else cut, self.task.seed, step)
        if self.mean_check is not None and not self.mean_check.is_done:
            part = self.mean_check.watch(part)
        return part if self.sabotage is None else self.sabotage.spoil(part, step)

    def sizes(self, step: int) -> Sizes | None:
        """Samples of each slot in this step; None: even."""
        if self.recorded_cuts is not None:
            return self.recorded_cuts.at(step)
        handover = handover_of(self.strategy)
        return None if handover is None else handover.sizes(step)

    def foresee(self, coming: Iterable[tuple[int, int]], since: int) -> None:
        """Let the feed load ahead: these steps and slots will be asked for, none of a step before `since`."""
        # Later steps are likely to be cut as this one; what is not is read when it is asked for.
        sizes = self.sizes(since)
        cuts = ((step, cut) for step, slot in coming for cut in self.schedule.cuts(step, (slot,), sizes))
        self._feed.foresee(cuts, self.task.seed, since)

    def take_post(self) -> None:
        """Hear of samples that are sent to this process."""
        for dataset in self._shipped:
            dataset.take_post()

    def close(self) -> None:
        """Nothing more is trained on."""
        for dataset in self._shipped:
            dataset.close()
        self._feed.close()

    def warm_up(self, slots: range) -> None:
        """Run a forward and backward pass for nothing, so that the first real one is quick."""
        from shoal.step.compute import backward_part

        self.replica.train_mode()
        work = self.work(1, slots)
        backward_part(self.replica, work, work.parts[0])
        self.replica.module.zero_grad(set_to_none=True)

    @property
    def evaluation_interval(self) -> int:
        """Steps from one evaluation to the next."""
        return interval_of(self.task, self.schedule)


def interval_of(task: Task, schedule: Schedule) -> int:
    """Steps from one evaluation to the next."""
    return task.evaluate_every or schedule.steps_per_epoch


def num_tables(task: Task, schedule: Schedule) -> int:
    """Those of the most evaluations that there may be, with those that callbacks ask for."""
    planned = max(2, -(-schedule.total_steps // interval_of(task, schedule)))
    both = 1 if task.ema is None and task.swa is None else 2  # of the parameters, and of their average
    tables = Tables.of(task, has_clients=bool(held_of(schedule.order)))
    return both * (planned + (MOST_ASKED if task.callbacks else 0)) * tables.number
