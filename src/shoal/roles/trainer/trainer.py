"""`Trainer`: for people who own their process or their loop."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from shoal.checkpoint.model_stream import TensorStream, save_stream
from shoal.checkpoint.streamed import StreamedState
from shoal.datasets.given import numbered
from shoal.errors import SpecError
from shoal.feed.feed import map_tensors
from shoal.feed.parts import LoadedBatch, Part
from shoal.model.optimizer.state import check_savable, check_state
from shoal.model.start import Start
from shoal.roles.callbacks.opening import script_callbacks
from shoal.roles.loading.start import read_start, start_of
from shoal.roles.memory.limit import limit_memory
from shoal.roles.process.devices import choose_device
from shoal.roles.process.joining import Fellows, GivenFellows, orphan_watch
from shoal.roles.process.station import Station, current_station, world_at
from shoal.roles.trainer.attendants import Attendants, attended_world, check_attended
from shoal.roles.trainer.service import WatchedNotes, attend, looking_up, service_of, train_served
from shoal.roles.trainer.state import StepNotes, snapshot_of, streamed, write_state
from shoal.roles.trainer.step import num_samples, why_no_step
from shoal.roles.training.checkpointing import check_position
from shoal.roles.training.loop import Loop
from shoal.roles.training.observer import Outcome
from shoal.roles.training.training import Training
from shoal.spec import Cluster, Job, StrategySpec, Task, World, parse_strategy
from shoal.spec.features import check_task
from shoal.spec.step_form import StepForm
from shoal.spec.vocabulary import Role, State
from shoal.step.work import Work
from shoal.strategies import make_strategy
from shoal.strategies.base import Company, Setting

_MODEL_SUFFIX = ".safetensors"


class Trainer:
    """Trains a task in this process, together with the others that torchrun or `shoal run` started beside it.

    Either `trainer.fit()` runs the whole task, or `trainer.step(batch)` takes one step on a batch of your own;
    with several processes each passes its own part. Without a `strategy` it is that of `shoal run`, or data.
    """

    def __init__(
        self,
        task: Task,
        *,
        strategy: str | StrategySpec | None = None,
        device: str = "cpu",
        world: World | None = None,
        slots: int | None = None,
        precision: str = "fp32",
        recompute: bool = False,
        form: StepForm | None = None,
        report: Callable[[str], None] = print,
        serves: bool = False,
    ) -> None:
        """`device` is `cpu` or `cuda`; `form` says how steps run, as `StepForm(compile=True)`; `report` is told
        what the strategy has to say; `serves`: servers may be threads of the first process under `shoal run`, too,
        as they are elsewhere."""
        self._report = report
        form = form or StepForm()
        station = current_station() if world is None else None
        world = world_at(station) if world is None else world
        spec = parse_strategy(strategy or ("data" if station is None else station.job.strategy))
        # What a job may not ask for, a Trainer may not either.
        self._job = job = Job(
            target=type(self).__name__,
            strategy=str(spec),
            cluster=Cluster(workers=world.world_size, device=device),
            slots=slots,
            precision=precision,
            recompute=recompute,
            **asdict(form),
        )
        self._service = service_of(job, station, may_serve=serves)
        self._is_attended = self._service is None and job.conduct.servers > 0
        """Whether the first process runs coordinator and servers, too."""
        self._attendants: Attendants | None = None
        if self._is_attended:
            check_attended(job)
        limit_memory(None, is_frugal=job.conduct.frees_parameters)
        task = numbered(task)
        check_task(task, job.conduct, job.strategy)
        if task.best_by is not None:
            raise SpecError(
                "Trainer: the best model is kept in a run's folder, and a Trainer has none; leave keep_best and "
                "restore_best out, and save() what you want to keep, or use shoal train."
            )
        # What follows each other through the model is cut as a task's own micro-batches are.
        self._task = replace(task, accumulate=task.accumulate * job.conduct.microbatches)
        self._why_no_step = why_no_step(job)
        self._on_idle = orphan_watch()
        world = replace(world, device=choose_device(device, world.local_rank))
        if self._service is None:
            self._fellows = Fellows(world, self._on_idle)
            self._on_idle = self._fellows.look_up
        else:
            self._on_idle = looking_up(self._on_idle, self._service.reporter)
            self._fellows = GivenFellows(world)
        self._open(Start())

    def _open(self, start: Start) -> None:
        """Join the others, and begin where all of them do."""
        task, job, conduct = self._task, self._job, self._job.conduct
        self.world = world = self._fellows.gather()
        if self._is_attended:
            self.world = world = attended_world(world, job, self._fellows)
        strategy = make_strategy(job.spec, world, conduct.slots)
        self._training = training = Training(
            task,
            strategy,
            world,
            conduct,
            start=start,
            precision=job.precision,
            recompute=job.recompute,
            form=job.form,
        )
        has_servers = job.conduct.servers > 0
        training.callbacks = callbacks = script_callbacks(
            training, self._fellows, has_servers=self._service is not None
        )
        # Who owns the loop may have taken more steps than the task has.
        total_steps = max(training.extent.total_steps, start.step)
        self._setting = Setting(
            world=world,
            conduct=conduct,
            extent=replace(training.extent, total_steps=total_steps, is_kept=True),
            company=Company(
                report=self._report,
                on_idle=self._look_up,
                wants_stop=lambda: callbacks is not None and callbacks.wants_stop,
            ),
            supply=training,
            clip_norm=task.clip_norm,
        )
        if training.weighing is not None and world.is_first:
            self._setting.company.report(training.weighing.text)
        # Servers have the model in `fit`; before it and after, each process has it to itself.
        self._strategy = make_strategy(job.spec.for_inference(), World(), 1) if has_servers else strategy
        self._notes = StepNotes(start) if self._service is None else WatchedNotes(start, self._service.reporter)
        self._strategy.open(training.replica, self._setting)
        self._is_open = True
        self._loop = Loop(training, self._setting, self._notes)
        self._loop.catch_up()
        training.replica.train_mode()
        self._total_is_known = self.lanes == 1 and task.skip_loss_below is None
        self._fellows.enter(start.step)
        self.steps = start.step
        """Steps taken so far."""
        self.loss_parts: Mapping[str, float] = {}
        """By name: the numbers that the loss of the last `step` was told with, where it is a dict."""

    @property
    def model(self) -> torch.nn.Module:
        """The model, or what this process has of it; its parameters may lie in memory that processes share."""
        return self._training.replica.module

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The task's optimizer. What it keeps may lie elsewhere: in memory that all share, a part at each."""
        return self._training.replica.optimizer

    @property
    def scheduler(self) -> Any:
        """The task's scheduler, which each step of the job advances; None where it has none."""
        return self._training.replica.scheduler

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return self._training.replica.learning_rate

    @property
    def lanes(self) -> int:
        """Batches that one `step` takes: of each process its own, or one of those that compute it together."""
        return self._setting.slots

    @property
    def lane(self) -> int:
        """Which of them this process passes; all processes of a lane pass the same."""
        return self._setting.slots_of(self.world.global_rank)[0]

    def step(self, batch: Any) -> float:
        """Forward, backward, agree, update. Returns the loss over all processes' batches."""
        if self._why_no_step:
            raise SpecError(self._why_no_step)
        if self.world.device != "cpu" and not self._job.form.graph:  # a captured step fetches it
            batch = map_tensors(batch, lambda t: t.to(self.world.device, non_blocking=True))
        counts = self._training.task.weight
        weight = float(num_samples(batch)) if counts is None else float(counts(batch))

        def load() -> Iterator[LoadedBatch]:
            yield batch, weight, 0  # no book is kept of batches that the user has cut

        self._fellows.enter(self.steps + 1)
        part = Part(self.lane, load, weight if self._total_is_known else None)
        result = self._training.strategy.take(Work(self.steps + 1, (part,), self._task.seed)).result()
        self.steps += 1
        self._training.replica.advance(result.loss)
        self._notes.losses.append(result.loss)
        self.loss_parts = result.parts
        return result.loss

    def fit(self) -> Outcome:
        """Run the whole task, as `shoal train` would; after `load`, what is left of it. Servers end with it."""
        start = self._training.replica.start
        if self.steps > start.step:
            raise SpecError(
                f"Trainer: fit() begins at the first step, but {self.steps} were taken already; "
                "make a new Trainer."
            )
        check_position(start, self._training.schedule, self._task.seed)
        if self._service is not None:
            self._service.begin()
            if self._service.world.role != Role.WORKER:
                self._attend(self._service, start)
        try:
            if self._service is not None:
                outcome = self._train_with(self._service.reporter.on_state)
            else:
                outcome = self._train_attended(start) if self._is_attended else self._loop.run()
        finally:
            self._training.close()
        self._fellows.enter(outcome.step)
        self.steps = outcome.step
        if self._training.callbacks is not None:
            self._training.callbacks.end(outcome.reason)
        return outcome

    def _attend(self, service: Station, start: Start) -> NoReturn:
        """Serve those who train until the run is over, and with it this process."""
        self._leave()
        # Servers make the model anew, in memory that all share, and the coordinator needs none.
        del self._training, self._strategy, self._loop, self._setting
        attend(service, self._job, self._task, start)
        raise SystemExit(0)

    def _train_attended(self, start: Start) -> Outcome:
        """The first process serves, too, until all have what they need of its servers."""
        if self.world.is_first:
            self._attendants = Attendants(self._job, self._task, start, self.world)
        try:
            outcome = self._train_with(lambda state, step: None)
            self._fellows.hear_first()
            if self._attendants is None:
                return outcome
            self._attendants.close()
            return replace(outcome, facts={**outcome.facts, "audit": self._attendants.audit})
        except BaseException:
            if self._attendants is not None:
                self._attendants.abandon()
            raise

    def _look_up(self) -> None:
        self._on_idle()
        if self._attendants is not None:
            self._attendants.look()

    def _train_with(self, on_state: Callable[[State, int], None]) -> Outcome:
        outcome = train_served(on_state, self._training, self._setting, self._loop)
        if self.world.is_first or self._training.evaluator is None:
            return outcome
        return replace(outcome, results=self.evaluate())  # the first one alone has evaluated

    def evaluate(self) -> dict[str, float]:
        """Loss and metrics over the task's test set, spread over the processes."""
        if self._training.evaluator is None:
            raise SpecError("Trainer: there is nothing to evaluate on; give the task a test set with test=.")
        return self._training.evaluator.run(self._strategy, self.world)

    def settle(self) -> None:
        """Let `model` be that of the last step, its moving buffers, too. All processes call this, and go on when
        all have come: who changes parameters afterwards disturbs nobody who was still reading them."""
        self._fellows.hear_first()
        self._strategy.model_stream(self._training.replica).drain()

    def hear_first(self, text: str = "") -> str:
        """What the first process says, up to 1,024 bytes; `text` is its own. All call this, and the first goes on
        when all have heard it."""
        return self._fellows.hear_first(text)

    def state_dict(self) -> dict[str, Any]:
        """A copy of the training state after the last step: the model, what the optimizer keeps, and what the
        scheduler has seen. All processes call this; where the model is cut, the first one has the tensors."""
        model, optimizer = self._streams()
        return {
            "step": self.steps,
            "model": {name: tensor.clone() for name, tensor in model.tensors},
            "optimizer": {name: tensor.clone() for name, tensor in optimizer.tensors},
            "losses": list(self._notes.losses),
            "facts": self._notes.facts(self._training),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was called, as with `load`; where the model is cut, with the first's state."""
        if not self._job.conduct.gathers:
            self._begin_again(start_of(snapshot_of(state)))
            return
        with tempfile.TemporaryDirectory(prefix="shoal-state-") as folder:
            path = Path(folder) / "state"
            self._by_first(lambda: write_state(path, streamed(snapshot_of(state))))
            self.load(self._fellows.hear_first(str(path)))
            self._fellows.hear_first()  # until then the first keeps it

    def save(self, path: str | Path) -> str:
        """Save the training state as a folder, a checkpoint as `shoal train` makes it; or the model alone, as a
        file, where the name ends in .safetensors. The first process writes, and returns the model's digest; all
        call this, since each may have a part."""
        target = Path(path)
        if target.suffix == _MODEL_SUFFIX:
            model = self._strategy.model_stream(self._training.replica)
            return self._by_first(lambda: save_stream(target, model), model)
        model, optimizer = self._streams()
        state = StreamedState(
            step=self.steps,
            model=model,
            optimizer=optimizer,
            losses=torch.tensor(self._notes.losses, dtype=torch.float64),
            facts=self._notes.facts(self._training),
        )
        return self._by_first(lambda: write_state(target, state), model, optimizer)

    def load(self, path: str | Path) -> None:
        """Go on where a state was saved, bit by bit; of a model's file, take the weights, and begin anew.

        Model, optimizer and scheduler are made again: ask the Trainer for them after this. All processes call it.
        """
        self._fellows.hear_first()  # who may still be writing it
        source = "resume" if Path(path).is_dir() else "from"
        self._begin_again(read_start(replace(self._job, options={source: str(path)})))

    def close(self) -> None:
        """Leave the others."""
        self._fellows.leave()  # before anything that may wait for them
        self._leave()
        self._fellows.close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _streams(self) -> tuple[TensorStream, TensorStream]:
        """Model and optimizer state as the first process gets them; all consume them, one after the other."""
        replica = self._training.replica
        check_savable(self._job, replica)
        check_state(replica)
        return self._strategy.model_stream(replica), self._strategy.state_stream()

    def _by_first(self, write: Callable[[], str], *streams: TensorStream) -> str:
        """Let the first process write what all give; what it could not write it takes all the same, since others
        wait until it has come."""
        try:
            return write() if self.world.is_first else ""
        finally:
            for stream in streams:
                stream.drain()

    def _begin_again(self, start: Start) -> None:
        self._leave()
        del self._training, self._strategy, self._loop  # nobody needs two models
        self._open(start)

    def _leave(self) -> None:
        if self._is_open:
            self._is_open = False
            self._training.close()
            self._strategy.close()
