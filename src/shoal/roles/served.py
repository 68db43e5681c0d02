"""A worker's life in a served job: the loop between fetching parameters and pushing what it computed."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

from shoal.coordinator.policy import has_diverged
from shoal.errors import Diverged, PeerLost, ShoalError
from shoal.roles.borders import Borders
from shoal.roles.checkpointing import Checkpointing, check_position, lacks_model
from shoal.roles.departure import Departure
from shoal.roles.loading import load_task
from shoal.roles.memory import check_fits
from shoal.roles.part_fetching import fetch_by_parts
from shoal.roles.reporter import Reporter
from shoal.roles.starting import read_start
from shoal.roles.training import Outcome, Training
from shoal.roles.turns import Turns
from shoal.spec import Job, ParameterServer, World
from shoal.spec.vocabulary import State
from shoal.strategies.base import StepResult, Work
from shoal.strategies.data.single import SingleProcess
from shoal.strategies.ps.client import PsClient
from shoal.strategies.ps.contributions import Computed
from shoal.strategies.ps.making import make_contribute
from shoal.strategies.ps.served import Served

DIVERGED_PAUSE_S = 0.25
"""How long a worker whose loss is no number waits before it looks whether the parameters are better."""


class StopRequested(ShoalError):
    """The run is to end while this worker waits for others."""


class ServedTraining:
    """One worker's part in training a served model. Worker 0 evaluates, saves, and speaks for all."""

    def __init__(self, job: Job, world: World, reporter: Reporter) -> None:
        task = load_task(job)
        check_fits(job, task)
        if not job.options.get("evaluate", True):
            task = replace(task, test=None, stop=None)
        spec = ParameterServer.of(job)
        self.world = world
        start = read_start(job)
        self.training = Training(
            task,
            SingleProcess(),
            world,
            job.conduct,
            numerics=job.numerics,
            start=start,
            precision=job.precision,
            recompute=job.recompute,
        )
        self.served = Served.open(
            spec, self.training.replica, world, slots=job.num_slots, workers=job.cluster.workers
        )
        self.client = PsClient(self.served, world, self._on_idle)
        self._spec = spec
        self._reporter = reporter
        self._slots = job.num_slots
        self._my_slots = range(0) if spec.is_leased else job.conduct.fills[world.global_rank]
        check_position(start, self.training.schedule, task.seed, may_be_over=lacks_model(job))
        self._begun_at = start.step
        """Steps that an earlier run took. Servers and coordinator count from here."""
        self._borders = Borders(self.client, spec, world, slots=self._slots, save=self._save)
        self._turns = Turns(
            self.client,
            spec,
            world,
            self._borders,
            slots=self._slots,
            own=self._my_slots,
            steps=self._steps_to_take,
        )
        self._contribute = make_contribute(self.served, self.client, self._make_work, world)
        self.client.scale.bind(reporter.line, is_first=world.is_first)
        self._checkpoints = Checkpointing(job, self.training.replica, self.training.schedule, reporter)
        self.training.checkpoints = self._checkpoints
        if not self._turns.leaves_out_the_late:
            self._checkpoints.book = self.training.book
        self._history: list[float] = []
        self._results: dict[str, float] = {}
        self._step = start.step
        self._loss = math.nan
        self._first_loss = start.losses[0] if start.losses else math.nan
        self._reason = "finished"
        self._departure = Departure(
            in_lockstep=spec.is_lockstep,
            is_first=world.is_first,
            wants_stop=reporter.wants_stop,
            saves=self._checkpoints.is_on,
            is_at_rest=lambda: self._borders.is_at_rest,
        )

    def run(self) -> Outcome:
        """Train until the data is used up, or until it is enough, or until asked to stop."""
        self.training.replica.train_mode()
        self._replay()
        fetch_by_parts(self.training, self.client)
        total, is_at_border = self.training.schedule.total_steps, True
        try:
            for clock, cells in self._turns:
                if self._departure.is_due_at_border():  # as it was before this worker joined
                    self._reason = "stopped"
                    break
                self._foresee(cells)
                self._take_step(clock, cells)
                self._reporter.pulse.sign()
                if self._reason != "finished":
                    break
            self._departure.is_used_up = True
            self._borders.end(self._clocks_to_take + 1)
            self.client.finish()
            if self.world.is_first and self._reason == "finished":
                self._await_others(total)
        except StopRequested:
            self._reason = "plateau" if self.client.is_told_to_stop else "stopped"
            is_at_border = not self._departure.is_in_step
        self._departure.is_over = True
        if (why := self.client.failure) is not None:
            # Shards stand at different moments: what could be fetched now is nobody's model.
            raise PeerLost(f"The coordinator has ended the run: {why}")
        if self.world.is_first and self.client.machine.is_ready:
            if self._spec.is_lockstep and self._reason == "stopped":
                self._note_steps_of_the_dead()
            self.client.fetch()
            if self._reason == "finished":
                self._evaluate(total)
                self._warn_if_diverged()
            if is_at_border and (self._reason == "finished" or self._spec.is_lockstep):
                self._enter_steps(self._step)
                self._checkpoints.save_last(self._step, self.client.puller.snapshot)
        return Outcome(self._step, self._loss, self._results, self._reason)

    def _note_steps_of_the_dead(self) -> None:
        """A successor that comes when all have stopped has taken no step itself."""
        done = self._begun_at + (self.client.next_open_round - 1) * self._spec.every
        if done > self._step:
            self._step = done
            self._checkpoints.note_step(done, self._loss)

    def _foresee(self, cells: list[int]) -> None:
        """Let the data of what comes next be loaded: these cells, and those that are likely to follow."""
        first = self._begun_at + min(cells) // self._slots + 1
        coming = (
            (self._begun_at + cell // self._slots + 1, cell % self._slots) for cell in self._turns.after(cells)
        )
        self.training.foresee(coming, first)

    def _replay(self) -> None:
        """Let what follows the steps, which an earlier run took, see them."""
        start, stop = self.training.replica.start, self.training.task.stop
        for loss in start.losses:
            self.training.replica.advance(loss)
        if stop is not None:
            self._history = [results[stop.metric] for _, results in sorted(start.evaluations.items())]

    def _make_work(self, step: int, slots: range, *, apart: bool) -> Work:
        self.training.witness.step = self._begun_at + step
        return self.training.work(self._begun_at + step, slots, apart=apart)

    @property
    def _steps_to_take(self) -> int:
        return self.training.schedule.total_steps - self._begun_at

    @property
    def _clocks_to_take(self) -> int:
        """The same in pushes, where every rank has cells of its own."""
        return -(-self._steps_to_take // self._spec.every)

    def close_checkpoints(self) -> None:
        """Wait until what was saved is on disk."""
        self._checkpoints.close()

    def close(self) -> None:
        """Leave the others."""
        self.training.close()
        self._contribute.close()
        self.client.close()

    def facts(self) -> dict[str, Any]:
        """What the run's results say besides: how this worker's pushes travelled, and whose its scale is."""
        codec, scale = self.client.compression, self.client.scale.facts()
        if self.served.shares_memory:
            return {"wire": {"kind": "memory"}, **scale}
        if self.world.is_first and codec.raw_bytes:
            self._reporter.line(f"compress={codec.text}: pushes took {codec.ratio:.3g} of their bytes on the wire")
        sizes = {"raw_bytes": codec.raw_bytes, "wire_bytes": codec.wire_bytes, "ratio": codec.ratio}
        return {"wire": {"kind": "tcp", "compress": codec.text, **sizes}, **scale}

    def _take_step(self, clock: int, cells: list[int]) -> None:
        """Take a step; where the loss is no number, wait for the coordinator to roll back, and try again."""
        while True:
            try:
                parts = self._compute_and_push(clock, cells)
                break
            except Diverged:
                if self._spec.is_lockstep or self._spec.diverging == "ignore":
                    raise
                self.client.report(loss=math.nan)
                self.client.pause(DIVERGED_PAUSE_S)
        self._complete(clock, parts)

    def _compute_and_push(self, clock: int, cells: list[int]) -> list[Computed]:
        """Fetch, compute on these cells, push; each slot's cells are one push."""
        self._borders.begin(clock)
        begun = time.monotonic()
        by_slot: dict[int, list[int]] = {}
        for cell in cells:
            by_slot.setdefault(self._slot_for(cell), []).append(cell)
        self._departure.is_in_step = True
        moving, parts = self.served.moving.own, []
        committed = moving.clone() if len(by_slot) > 1 else moving
        for slot, own in by_slot.items():
            moving.copy_(committed)  # every slot starts from the same moving buffers
            parts.append(self._contribute(clock, own, slot))
        self.client.report(samples_per_s=sum(part.weight for part in parts) / max(time.monotonic() - begun, 1e-9))
        return parts

    def _complete(self, clock: int, parts: list[Computed]) -> None:
        """What was pushed is on its way: say so, and where all go on together wait for it."""
        loss, weight = sum(part.loss for part in parts), sum(part.weight for part in parts)
        mean = loss / weight if weight else math.nan
        step = self._begun_at + max(cell for part in parts for cell in part.cells) // self._slots + 1
        if math.isnan(self._first_loss):
            self._first_loss = mean
            self.client.report(first_loss=mean)
        self.client.report(step=step, loss=mean)
        if self.served.consistency.gathers(clock):
            self._borders.await_round(clock)
            mean = self.client.machine.rounds_loss
            self.client.scale.follow_round(step)
        if step > self._step:
            self._step_is_done(step, mean, weight)
        self._departure.is_in_step = False

    def _slot_for(self, cell: int) -> int:
        """Whose buffers take what is computed on a cell: what goes into the same ones is pushed together."""
        if self._spec.is_leased:
            return self.world.global_rank
        return cell % self._slots if self._spec.via == "direct" else self._my_slots.start

    def _await_others(self, total: int) -> None:
        """Others may still train on the last cells."""
        if self.served.host is not None and self._spec.is_leased:
            self.client.await_cells(self._steps_to_take * self._slots)
        if not self._spec.is_leased:
            self.client.await_all(self._clocks_to_take)
        if self._step < total:  # the others did the last ones
            loss = self.client.machine.rounds_loss if self._turns.leaves_out_the_late else self._loss
            self._step_is_done(total, loss, 0.0)

    def _step_is_done(self, step: int, loss: float, weight: float) -> None:
        training, schedule = self.training, self.training.schedule
        before, self._step, self._loss = self._step, step, loss
        self._checkpoints.note_step(step, loss)
        rate, epoch = training.replica.learning_rate, schedule.epoch_of(step)
        self._reporter.on_step(
            step,
            StepResult(loss, weight, False),
            schedule.samples_after(step),
            rate,
            epoch,
            committed=self._committed_samples(),
        )
        for _ in range(step - before if self._spec.push == "gradients" else 0):
            training.replica.advance(loss)
        interval = training.evaluation_interval
        if self.world.is_first and step // interval > before // interval and step < schedule.total_steps:
            self.client.fetch()
            self._evaluate(step)
        if self.world.is_first and step < schedule.total_steps and self._checkpoints.is_due(step):
            self._borders.bring_about(step - self._begun_at)
        if self._departure.calls_all():
            self._borders.call_all()
        if self._departure.is_due_at_border():
            self._reason = "stopped"

    def _save(self, steps: int, waited_s: float) -> None:
        step = self._begun_at + steps
        self.client.fetch()
        self._checkpoints.note_step(step, self._loss)
        self._enter_steps(step)
        model = self.training.replica.module.state_dict
        self._checkpoints.save(step, model, self.client.puller.snapshot, waited_s)
        if self._departure.calls_all():
            self._step = step
            if self._departure.enough:
                self.client.ask_to_stop(self._departure.enough)
            raise StopRequested("The run was asked to stop, and is saved.")  # Nobody goes on from this border.

    def _enter_steps(self, step: int) -> None:
        """All shards have what was pushed up to this step and nothing more, so the book can say so."""
        if (book := self._checkpoints.book) is not None:
            book.commit_whole(self.training.schedule, step)

    def _committed_samples(self) -> int | None:
        """What all workers together have trained on, as far as is known here; None where they go in lockstep."""
        if self.served.consistency.next_gathered(0) is not None:
            return None
        machine, schedule, begun_at = self.client.machine, self.training.schedule, self._begun_at
        if machine.leases is None:
            steps = begun_at + min(link.floor for link in machine.links) * self._spec.every
            return schedule.samples_after(min(steps, schedule.total_steps))
        steps, rest = divmod(begun_at * self._slots + machine.leases.committed, self._slots)
        before, after = schedule.samples_after(steps), schedule.samples_after(steps + 1)
        return before + (after - before) * rest // self._slots

    def _evaluate(self, step: int) -> None:
        evaluator, stop = self.training.evaluator, self.training.task.stop
        if evaluator is None:
            return
        self._reporter.on_state(State.EVALUATING, step)
        self._results = evaluator.run(self.training.strategy, World())
        self._reporter.on_state(State.TRAINING, step)
        self._reporter.on_evaluation(step, self._results)
        self._checkpoints.note_evaluation(step, self._results)
        if stop is not None and step < self.training.schedule.total_steps:
            self._history.append(self._results[stop.metric])
            if stop.reached(self._history):
                self._departure.enough = f"the {stop.metric} no longer gets better"
                if not self._departure.meets:
                    self._reason = "plateau"
                    self.client.ask_to_stop(self._departure.enough)

    def _warn_if_diverged(self) -> None:
        """A run may be over before the coordinator has seen enough to act."""
        if math.isnan(self._first_loss) or self._spec.is_lockstep:
            return
        if has_diverged(self._loss, first=self._first_loss):
            text = (
                f"the run diverged: its loss began at {self._first_loss:.4g} and ended at {self._loss:.4g}; lower "
                "the learning rate, or set clip_norm"
            )
            self._reporter.warn(text)

    def _on_idle(self) -> None:
        self._borders.speak()
        self._reporter.pulse.idle()
        if self._departure.is_over or not self.client.machine.is_ready:
            return  # A successor joins first: what was to be saved at the end may be left to it.
        if self._departure.calls_all():
            self._borders.call_all()
        if self._departure.is_due_while_waiting() or (self.client.is_told_to_stop and self._reason == "finished"):
            raise StopRequested("The run was asked to stop.")
