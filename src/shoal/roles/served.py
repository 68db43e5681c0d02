"""A worker's life in a served job: the loop between fetching parameters and pushing gradients."""

from __future__ import annotations

import math
import time
from dataclasses import replace

from shoal.errors import ShoalError
from shoal.roles.loading import load_task
from shoal.roles.reporter import Reporter
from shoal.roles.training import Outcome, Training
from shoal.spec import Job, ParameterServer, World
from shoal.strategies.base import StepResult
from shoal.strategies.data.single import SingleProcess
from shoal.strategies.gradients import backward_part
from shoal.strategies.ps.client import Contribution, PsClient
from shoal.strategies.ps.served import Served


class StopRequested(ShoalError):
    """The run was asked to stop while this worker waited for others."""


class ServedTraining:
    """One worker's part in training a served model. Worker 0 evaluates, saves, and speaks for all."""

    def __init__(self, job: Job, world: World, reporter: Reporter) -> None:
        task = load_task(job)
        if not job.options.get("evaluate", True):
            task = replace(task, test=None, stop=None)
        self.world = world
        self.training = Training(task, SingleProcess(), world, job.num_slots, numerics=job.numerics)
        spec = job.spec
        assert isinstance(spec, ParameterServer)
        self.spec = spec
        self.served = Served.open(
            spec, self.training.replica, world, slots=job.num_slots, workers=job.cluster.workers
        )
        self._reporter = reporter
        self.client = PsClient(self.served, world, self._on_idle)
        self._slots = job.num_slots
        self._my_slots = range(
            job.num_slots * world.global_rank // job.cluster.workers,
            job.num_slots * (world.global_rank + 1) // job.cluster.workers,
        )
        self._history: list[float] = []
        self._results: dict[str, float] = {}
        self._loss = math.nan
        self._reason = "finished"

    def run(self) -> Outcome:
        """Train until the data is used up, or until asked to stop."""
        self.training.replica.train_mode()
        total = self.training.schedule.total_steps
        step = 0
        try:
            step = self._run_leased() if self.spec.is_asynchronous else self._run_ranked()
            self.client.finish()
            if self.world.is_first and self._reason == "finished":
                if not self.spec.is_asynchronous:
                    self.client.await_all(total)
                step = total
        except StopRequested:
            self._reason = "stopped"
        if self.world.is_first:
            self.client.fetch()
            if self._reason == "finished":
                self._evaluate(total)
        return Outcome(step, self._loss, self._results, self._reason)

    def _run_ranked(self) -> int:
        """Every rank has its own slots of every step."""
        schedule, step = self.training.schedule, self.client.join()
        while step < schedule.total_steps and self._reason == "finished":
            step += 1
            self.client.begin(step)
            gathered = self.served.consistency.gathers(step)
            loss = weight = 0.0
            for slot in self._my_slots:
                cell = (step - 1) * self._slots + slot
                part_loss, part_weight = self._contribute(cell, slot, step, apart=not gathered)
                loss, weight = loss + part_loss, weight + part_weight
            mean = loss / weight if weight else math.nan
            if gathered:
                self.client.await_round(step)
                mean = self.client.machine.rounds_loss
            self._step_is_done(step, mean, weight)
        return step

    def _run_leased(self) -> int:
        """Whoever is free takes the next cell."""
        self.client.join()
        clock = step = 0
        while self._reason == "finished" and (cell := self.client.take_cell()) is not None:
            clock += 1
            self.client.begin(clock)
            loss, weight = self._contribute(cell, self.world.global_rank, clock, apart=True)
            own_step = cell // self._slots + 1
            if own_step > step:
                step = own_step
                self._step_is_done(step, loss / weight if weight else math.nan, weight)
        if self._reason == "finished" and step < self.training.schedule.total_steps:
            step = self.training.schedule.total_steps  # Others trained on the last cells.
            self._step_is_done(step, self._loss, 0.0)
        return step

    def _contribute(self, cell: int, buffer_slot: int, clock: int, *, apart: bool) -> tuple[float, float]:
        """Compute one cell's gradient and push it."""
        step, slot = cell // self._slots + 1, cell % self._slots
        work = self.training.work(step, range(slot, slot + 1), apart=apart)
        place = self.client.aim(buffer_slot, clock)
        begun = time.monotonic()
        loss, weight = backward_part(self.training.replica, work, work.parts[0], self.client.tap.backward)
        self.client.push(
            Contribution(
                clock=clock,
                cells=[cell],
                place=place,
                weight=weight,
                loss=loss,
                scaled=work.parts[0].total_weight is not None,
            )
        )
        seconds = max(time.monotonic() - begun, 1e-9)
        self.client.report(step=step, loss=loss / weight if weight else 0.0, samples_per_s=weight / seconds)
        return loss, weight

    def _step_is_done(self, step: int, loss: float, weight: float) -> None:
        training, schedule = self.training, self.training.schedule
        self._loss = loss
        result = StepResult(loss, weight, False)
        rate, epoch = training.replica.learning_rate, schedule.epoch_of(step)
        self._reporter.on_step(step, result, schedule.samples_after(step), rate, epoch)
        training.replica.advance(loss)
        if self.world.is_first and training.evaluates_after(step) and step < schedule.total_steps:
            self.client.fetch()
            self._evaluate(step)
        if self._reporter.wants_stop():
            self._reason = "stopped"

    def _evaluate(self, step: int) -> None:
        evaluator, stop = self.training.evaluator, self.training.task.stop
        if evaluator is None:
            return
        self._reporter.on_state("evaluating", step)
        self._results = evaluator.run(self.training.strategy, World())
        self._reporter.on_state("training", step)
        self._reporter.on_evaluation(step, self._results)
        if stop is not None:
            self._history.append(self._results[stop.metric])
            if stop.reached(self._history):
                self._reason = "plateau"

    def _on_idle(self) -> None:
        if self._reporter.wants_stop():
            raise StopRequested("The run was asked to stop.")
