"""The training loop: the same for every strategy, and for a process that joins in the middle.

A strategy says what comes next (a turn); the loop takes it, and enters what it came to. A turn may stay open for a
while after it was taken. Book, report, learning rate, evaluation, checkpoints and the end follow from turns that
were entered, and these are entered in their order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from torch.optim.lr_scheduler import ReduceLROnPlateau

from shoal.ledger import Schedule
from shoal.roles.callbacks.telling import MOST_NOTED
from shoal.roles.training.evaluations import Evaluations
from shoal.roles.training.hosting import MoveOrder, PlacesMoved
from shoal.roles.training.observer import Observer, Outcome
from shoal.roles.training.saves import Saves
from shoal.roles.training.training import Training
from shoal.spec.conduct import StateHolder
from shoal.step.work import Turn, Work
from shoal.strategies.base import Commit, Setting, StepResult, handover_of

T = TypeVar("T")


class _Taken(NamedTuple):
    """A turn that was taken, and is not entered yet."""

    turn: Turn
    commit: Commit
    learning_rate: float


class Loop:
    """One process's way through a run."""

    def __init__(self, training: Training, setting: Setting, observer: Observer) -> None:
        self._training = training
        self._setting = setting
        self._observer = observer
        self._callbacks = training.callbacks
        self._evaluations = Evaluations(training, observer, self._despite_moves)
        is_saved = training.checkpoints is not None and training.checkpoints.is_on
        self._saves = Saves(training, setting, self.gather, self._go_on) if is_saved else None
        needs_loss = isinstance(training.replica.scheduler, ReduceLROnPlateau)
        self._most_open = 1 if needs_loss else training.conduct.open_commits
        self._open: deque[_Taken] = deque()
        self._step = 0
        """The last step that is done, as far as this process knows."""
        self._loss = float("nan")
        self._facts: Mapping[str, Any] = {}
        self._followed = 0
        """Steps of others that the scheduler has seen already."""
        self._stops = ""
        """Why the turns that are open are the last, where they are."""
        self._is_to_save = False
        """Whether all save after the turns that are open."""

    def follow(self) -> None:
        """While this process waits for a place: let the scheduler see what others commit, so that little is left.

        The last step is left for `run`: it may be the one that ended the run.
        """
        handover, replica = handover_of(self._training.strategy), self._training.replica
        if handover is None or replica.scheduler is None:
            return
        if (last := handover.committed() - 1) > self._followed:
            self._see_past(handover.losses(self._followed + 1, last))

    def catch_up(self) -> None:
        """Let the scheduler see all steps of earlier runs, for who looks at it before this one goes on."""
        losses = self._training.replica.start.losses
        self._training.replica.advance_over(losses[self._followed :])
        self._followed = len(losses)

    def join(self) -> int:
        """Host the first places of this process; the last step that is committed in them."""
        training, handover = self._training, handover_of(self._training.strategy)
        assert handover is not None, "there are no spares where nobody can go on for another"
        while True:
            training.take_post()  # those whom it has to meet may be waiting for samples
            try:
                return handover.reform(training.world)
            except PlacesMoved:  # a host was lost, or another came, while all came together
                for order in self._observer.take_orders(at_border=False):
                    training.world = order.applied_to(training.world) or training.world

    def run(self, committed: int = 0) -> Outcome:
        """Train until the end. Steps up to `committed` were taken before this process came: only replayed."""
        training, observer, handover = self._training, self._observer, handover_of(self._training.strategy)
        training.replica.train_mode()
        committed = max(committed, training.replica.start.step)
        if self._callbacks is not None:
            self._callbacks.begin(committed)
        if reason := self._replay(committed):
            return self._outcome(reason)
        for turn in training.strategy.turns(self._step + 1, self._schedule.total_steps):
            stop = observer.wants_stop()
            if self._callbacks is not None:
                stop = stop or self._callbacks.is_stop_due(turn.step)
            at_border = handover is None or handover.may_release
            orders = list(observer.take_orders(at_border=at_border))
            if orders and at_border and (reason := self._enter_all()):
                return self._outcome(reason)
            if not self.heed(orders):
                return self._outcome("released")
            if (last := (turn.first or 0) - 1) > self._step:
                self._evaluations.make_up_for(last)
            self._take(turn, stop=stop)
            while self._open and self._is_to_enter(turn):
                if reason := self._enter():
                    return self._outcome(reason)
        return self._outcome("finished")

    def _outcome(self, reason: str) -> Outcome:
        return Outcome(self._step, self._loss, self._evaluations.results, reason, self._facts)

    # What was before.

    def _replay(self, committed: int) -> str:
        """Let all that follows from steps see those that were taken before, however many; why they were all, where
        they were."""
        losses, was_stopped = self._read_past(committed)
        if not committed:
            return ""
        evaluations = self._evaluations
        self._see_past(losses[self._followed : committed])
        if self._saves is not None:
            self._saves.note_past(losses[:committed])
        self._step, self._loss = committed, losses[committed - 1]
        evaluations.catch_up(committed)
        reason = "stopped" if was_stopped else "finished" if committed == self._schedule.total_steps else ""
        if evaluations.enough and not evaluations.is_for_all:
            reason = "plateau"
        if reason and self._saves is not None:  # who committed the last step may have died before it was saved
            self._saves.after(committed, self._loss, is_agreed=False, is_last=True)
        return reason

    def _see_past(self, losses: Sequence[float]) -> None:
        """Let the scheduler see the next steps that others have taken; and callbacks, which may not have been told
        of the last ones."""
        replica, first = self._training.replica, self._followed + 1
        self._followed += len(losses)
        long_ago = max(0, len(losses) - MOST_NOTED)
        replica.advance_over(losses[:long_ago])
        for step, loss in enumerate(losses[long_ago:], first + long_ago):
            if self._callbacks is not None:
                self._callbacks.step_is_done(step, loss, replica.learning_rate)
            replica.advance(loss)

    def _read_past(self, committed: int) -> tuple[Sequence[float], bool]:
        """Enter into the book what others of this run have committed; the losses of all steps up to then, and
        whether that was all, on request."""
        training = self._training
        first, handover = training.replica.start.step + 1, handover_of(training.strategy)
        if committed < first or handover is None:
            return training.replica.start.losses, False
        past = handover.past(first, committed)
        if training.book is not None:
            training.book.commit_past(first, past.counts, past.sizes)
        return handover.losses(1, committed), past.was_stopped

    # A turn is taken.

    def _take(self, turn: Turn, *, stop: bool) -> None:
        """Forward, backward, agree, update: what the strategy makes of the turn."""
        training, rate = self._training, self._training.replica.learning_rate
        evaluations = self._evaluations
        if self._callbacks is not None and self._callbacks.begin_turn(turn.step):
            self._callbacks.ask_evaluation(self._next_of_first(turn.step) + self._most_open - 1)
        enough = evaluations.enough if evaluations.is_for_all else ""
        if self._stop_was_asked and not training.conduct.is_lockstep and training.world.is_first:
            enough = enough or "a callback asked to stop"

        def act() -> Commit:
            save = self._saves is not None and self._saves.is_wished(turn.step)
            return training.strategy.take(self._work(turn, stop=stop, save=save, enough=enough))

        self._open.append(_Taken(turn, self._despite_moves(act), rate))
        if not self._open[-1].commit.is_known:
            self._observer.on_taken(turn.step)
        if self._most_open > 1:  # the next step begins before this one's loss is known, with its own learning rate
            training.replica.advance(float("nan"))

    def _next_of_first(self, step: int) -> int:
        """The next step that is not committed before the first worker has done its part: until then nobody is past
        it, and by then all can read what the first one has asked for."""
        steps = range(step, self._schedule.total_steps)
        decider = self._setting.decider
        return next((at for at in steps if decider(at) == 0), self._schedule.total_steps)

    def _work(self, turn: Turn, **asked: Any) -> Work:
        training, setting, step = self._training, self._setting, turn.step
        if turn.is_border:
            return training.work(step, (), turn=turn, **asked)
        if turn.coming is not None:  # what of the data it uses, the strategy asks for itself
            training.foresee(turn.coming, turn.first or step)
            return training.work(step, (), turn=turn, **asked)
        steps, places = range(step, self._schedule.total_steps + 1), training.world.places
        slots = [slot for place in places for slot in setting.slots_at(step, place)]
        coming = ((at, slot) for at in steps for place in places for slot in setting.slots_at(at, place))
        training.foresee(coming, step)
        return training.work(step, slots, turn=turn, **asked)

    # What it came to is entered.

    def _is_to_enter(self, turn: Turn) -> bool:
        """Whether the oldest open turn must be known now: too many are open, or none may be after this one."""
        return (
            len(self._open) >= self._most_open
            or self._open[0].commit.is_known
            or bool(self._stops)
            or self._is_to_save
            or turn.step >= self._schedule.total_steps
            or turn.step >= self._evaluation_due
            or (self._saves is not None and self._saves.is_due(turn.step))
        )

    def _enter_all(self) -> str:
        """Leave nothing open; why it was the last, where it was."""
        reason = ""
        while self._open:
            reason = self._enter()
        return reason

    def _enter(self) -> str:
        """All that follows from the oldest open turn; why it was the last, where it was."""
        turn, commit, learning_rate = self._open.popleft()
        result = self._despite_moves(commit.result)
        self._facts = result.facts
        self._stops = self._stops or (self._reason(result) if result.stop else "")
        if turn.is_border:
            if self._saves is not None:
                self._saves.make(turn.step, self._loss, waited_s=result.waited_s)
            if self._stops:
                self._step = turn.step  # who came in the place of another may have had no part in any step
            return self._stops
        before, step = self._step, turn.step if result.done is None else result.done
        if step > before:
            self._step_is_done(step, result, learning_rate)
        else:
            self._observer.on_turn()
        self._is_to_save = self._is_to_save or result.save
        if self._open and (self._stops or self._is_to_save):
            return ""  # the others were taken already, and by everybody
        return self._settle(before, is_whole=result.is_whole)

    def _reason(self, result: StepResult) -> str:
        """Why a turn was the last: who was told to stop does not know whether a plateau or a callback was why."""
        return "stopped" if self._stop_was_asked and not self._evaluations.enough else result.reason

    @property
    def _evaluation_due(self) -> float:
        return self._evaluations.due if self._callbacks is None else self._evaluations.look_for_asked()

    @property
    def _stop_was_asked(self) -> bool:
        return self._callbacks is not None and self._callbacks.stop_was_asked

    def _step_is_done(self, step: int, result: StepResult, learning_rate: float) -> None:
        training, schedule = self._training, self._schedule
        before, self._step, self._loss = self._step, step, result.loss
        if training.book is not None and result.counts:
            training.book.commit(step, result.counts, training.sizes(step))
        committed = None if result.cells is None else _samples_in(schedule, result.cells)
        samples, epoch = schedule.samples_after(step), schedule.epoch_of(step)
        if self._callbacks is not None:
            for each in range(before + 1, step + 1):  # others may have taken some of them alone
                self._callbacks.step_is_done(each, result.loss, learning_rate, result.parts)
        more = bool(self._open) and self._open[0].commit.is_known
        self._observer.on_step(step, result, samples, learning_rate, epoch, committed=committed, more=more)
        # Who pushes what it has trained to servers moves its own rate on, by its own losses.
        is_elsewhere = training.conduct.servers and training.conduct.state is StateHolder.EACH_WORKER
        if self._most_open == 1 and not is_elsewhere:
            training.replica.advance_over([result.loss] * (step - before))
        if self._saves is not None:
            self._saves.note(step, result.loss)

    def _settle(self, before: int, *, is_whole: bool) -> str:
        """What follows from a step when none is open after it: evaluation, a checkpoint, the end; why it is the
        end."""
        evaluations, step = self._evaluations, self._step
        reason = self._stops or ("finished" if step == self._schedule.total_steps else "")
        if step >= self._evaluation_due:
            evaluations.make(step)
            if evaluations.enough and not evaluations.is_for_all:
                reason = "plateau"
        is_whole = reason == "finished" or (self._training.conduct.is_lockstep and is_whole)
        if self._saves is not None and is_whole and (step > before or reason):
            self._saves.after(step, self._loss, is_agreed=self._is_to_save, is_last=bool(reason))
        elif self._saves is not None and reason:
            self._saves.regret(step)
        self._is_to_save = False
        return reason

    # Places.

    def gather(self) -> bool:
        """Have all there that is to be saved, whoever is lost meanwhile; whether all give it now."""
        handover = handover_of(self._training.strategy)
        return True if handover is None else self._despite_moves(handover.gather)

    def _go_on(self) -> None:
        """Host what came to this process in the middle of something that is not done again."""
        self.heed(self._observer.take_orders(at_border=False))

    def _despite_moves(self, act: Callable[[], T]) -> T:
        """What `act` returns; where it was left because places came to this process, it is done with them, too."""
        while True:
            self._training.take_post()
            try:
                return act()
            except PlacesMoved:
                self._go_on()

    def heed(self, orders: Iterable[MoveOrder]) -> bool:
        """Host the places that the supervisor orders; whether any are left."""
        training = self._training
        for order in orders:
            world = order.applied_to(training.world)
            if world is not None:
                training.world = world
                handover = handover_of(training.strategy)
                assert handover is not None, "places move where one can go on for another"
                try:
                    handover.reform(world)
                except PlacesMoved:  # another host was lost while all came together
                    return self.heed(self._observer.take_orders(at_border=False))
            self._observer.on_moved(order, world)
            if world is None:
                return False
            if world.is_first and training.best is not None:
                handover = handover_of(training.strategy)
                training.best.take_over(self._step, is_still=handover is None or handover.may_release)
        return True

    @property
    def _schedule(self) -> Schedule:
        return self._training.schedule


def _samples_in(schedule: Schedule, cells: int) -> int:
    """The samples of so many slots of steps, one after the other."""
    steps, rest = divmod(cells, schedule.slots)
    before, after = schedule.samples_after(steps), schedule.samples_after(steps + 1)
    return before + (after - before) * rest // schedule.slots
