"""A run's checkpoints as its first worker takes them: when, of what, and in the background."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from shoal.checkpoint.listing import Entry
from shoal.checkpoint.model_stream import TensorStream
from shoal.checkpoint.saver import BackgroundSaver
from shoal.checkpoint.snapshot import Snapshot
from shoal.checkpoint.store import CheckpointStore
from shoal.checkpoint.streamed import StreamedState
from shoal.errors import CheckpointError, SpecError
from shoal.ledger import Schedule
from shoal.ledger.book import Book
from shoal.model.optimizer.state import check_savable, check_state
from shoal.model.replica import Replica
from shoal.model.start import Start
from shoal.observe.happenings import CheckpointWritten
from shoal.observe.run_folder import RunFolder
from shoal.roles.callbacks.telling import Callbacks
from shoal.roles.loading.incremental import History
from shoal.roles.process.reporter import Reporter
from shoal.roles.training.protection import Protection
from shoal.spec import Job, vocabulary
from shoal.spec.checkpointing import CheckpointRule

State = Callable[[], Mapping[str, torch.Tensor]]
_WORDS = {"batch_size": "a batch size of", "seed": "seed", "length": "a number of samples of"}


class Checkpointing:
    """Remembers what a checkpoint says about the steps so far, and saves when one is due.

    Every process remembers, for any may become the one that speaks for all; only that one saves.
    """

    def __init__(self, job: Job, replica: Replica, schedule: Schedule, reporter: Reporter) -> None:
        self._job = job
        self._replica = replica
        self._schedule = schedule
        self._reporter = reporter
        self._rule = CheckpointRule.parse(job.checkpoint)
        self._history = History(job)
        if self.is_on:
            check_savable(job, replica)
        self._saver: BackgroundSaver | None = None
        self._last_step = replica.start.step
        self._saved_at = self._began_at = time.monotonic()
        self._due: list[int] = []
        """The steps that were to be saved here, whether the disk took them or not."""
        self._losses = list(replica.start.losses)
        self._evaluations = {step: dict(results) for step, results in replica.start.evaluations.items()}
        self._past_failures = int(job.options.get("failures", 0))
        self._past_s = float(job.options.get("ran_s", 0.0))
        """What earlier attempts of this run came to."""
        self._waited_s = 0.0
        self._has_stepped = False
        self.book: Book | None = None
        """What the slots of all committed steps have used, where that is counted here."""
        self.protection: Protection | None = None
        """What is done for the privacy of the data, where something is."""
        self.failures = 0
        """Members that the run has lost so far, as far as is known here."""
        self.callbacks: Callbacks | None = None
        """Who may ask for a checkpoint, and hears of each."""

    def note_step(self, step: int, loss: float) -> None:
        """A step is committed; where steps were left out by a worker of its own pace, they count as this one."""
        if self.is_on and not self._has_stepped:
            self._has_stepped = True
            check_state(self._replica)
        self._losses.extend([loss] * (step - len(self._losses)))

    def note_steps(self, losses: Sequence[float]) -> None:
        """These were the losses of all steps so far, whoever took them."""
        self._losses.extend(losses[len(self._losses) :])

    def note_evaluation(self, step: int, results: Mapping[str, float]) -> None:
        """The model was evaluated after a step."""
        self._evaluations[step] = dict(results)

    def note_saved(self, step: int) -> None:
        """Another process saves the state after this step."""
        self._last_step, self._saved_at = step, time.monotonic()

    @property
    def is_on(self) -> bool:
        """Whether anything is saved at all."""
        return not self._rule.is_off and bool(self._job.run_dir)

    def is_due(self, step: int) -> bool:
        """Whether to save after this step."""
        if not self.is_on:
            return False
        self._open_store(step)
        if self.callbacks is not None and self.callbacks.is_save_due(step, self._last_step):
            return True
        now = time.monotonic()
        return self._rule.is_due(
            step=step,
            last_step=self._last_step,
            seconds_since=now - self._saved_at,
            save_s=self._saver.seconds if self._saver else 0.0,
            failures_per_s=(self._past_failures + self.failures) / max(self._past_s + now - self._began_at, 1.0),
        )

    def save(self, step: int, model: State, state: State, waited_s: float = 0.0) -> None:
        """Save what model and optimizer are after this step; `model` and `state` give them.

        `waited_s`: how long the others had to be waited for, which counts as standing still.
        """
        self._reporter.flush()  # so that what was told ends where an attempt may begin again
        with self.at_the_disk():
            self._saver = self._open_store(step)
            if step <= self._last_step:
                # The newer one would be pruned sooner or later in its favour.
                self._on_failed(f"step {step} is not saved, because that of step {self._last_step} is newer")
                return
            self._waited_s = waited_s
            self._saver.offer(
                Snapshot(
                    step=step,
                    model=model(),
                    optimizer=state(),
                    losses=torch.tensor(self._losses[:step], dtype=torch.float64),
                    rng={},
                    facts=self._facts(step),
                )
            )
        self._note_save(step)

    def take(self, step: int, model: TensorStream, state: TensorStream) -> None:
        """Save what model and optimizer are after this step while they come, tensor by tensor."""
        self._waited_s = 0.0
        self._reporter.flush()
        losses = torch.tensor(self._losses[:step], dtype=torch.float64)
        with self.at_the_disk():
            self._saver = self._open_store(step)
            self._saver.take(
                StreamedState(step=step, model=model, optimizer=state, losses=losses, facts=self._facts(step))
            )
        self._note_save(step)

    def at_the_disk(self) -> AbstractContextManager[None]:
        """Whatever of saving a process does or waits for, it does in this block, lest it be taken for hung."""
        return self._reporter.pulse.during(vocabulary.State.SAVING)

    def _note_save(self, step: int) -> None:
        self._due.append(step)
        self._last_step, self._saved_at = step, time.monotonic()

    def _open_store(self, step: int) -> BackgroundSaver:
        """The way to the run's checkpoints, where the worker that was first before this one may have saved some.

        Those of later steps were left by a run that was longer before it was resumed.
        """
        if self._saver is None:
            store = CheckpointStore(self._folder, keep=self._rule.keep, report=self._reporter.warn)
            self._saver = BackgroundSaver(store, self._on_saved, self._on_failed)
            with self.at_the_disk():
                whole = [entry for entry in store.entries() if not entry.problem]
            earlier = [entry for entry in whole if self._last_step < entry.step < step]
            if earlier:
                self._last_step = earlier[-1].step
                # What was due while nobody could save is due at once.
                self._saved_at = time.monotonic() - max(0.0, time.time() - earlier[-1].saved_at)
        return self._saver

    @property
    def _folder(self) -> Path:
        return RunFolder(Path(self._job.run_dir)).checkpoints

    @property
    def last_step(self) -> int:
        """The step whose state was saved last; 0 where none was."""
        return self._last_step

    def has_saved(self, step: int) -> bool:
        """Whether the state after this step, or a later one, was saved."""
        return step <= self._last_step

    def close(self) -> None:
        """Wait until the last one is on disk."""
        if self._saver is not None:
            with self.at_the_disk():
                self._saver.close()

    @property
    def due(self) -> list[int]:
        """The steps whose checkpoints must be there at the end: the newest of what was to be saved, as many as are
        kept."""
        return self._due[-self._rule.keep :]

    def _facts(self, step: int) -> dict[str, Any]:
        schedule = self._schedule
        return {
            "job": json.loads(self._job.to_json()),
            "slots": schedule.slots,
            "batch_size": schedule.batch_size,
            "length": schedule.length,
            "seed": self._replica.task.seed,
            "samples": schedule.samples_after(step),
            "seen": self._history.after(step, self._replica.task, schedule),
            "book": None if self.book is None else self.book.plain(),
            "privacy": None if self.protection is None else self.protection.plain(step),
            "epoch": schedule.epoch_of(step) + 1,
            "precision": list(self._replica.precision.state.values),
            "evaluations": {str(at): results for at, results in self._evaluations.items()},
            # Random numbers follow from the seed, the step and the slot, whoever draws them.
            "random": "by seed, step and slot",
        }

    def _on_saved(self, entry: Entry, stall_s: float) -> None:
        if self.callbacks is not None:
            self.callbacks.checkpoint_is_written(entry.step)
        self._reporter.send(
            CheckpointWritten(
                step=entry.step,
                path=str(entry.path),
                digest=entry.digest,
                nbytes=entry.nbytes,
                seconds=entry.seconds,
                stall=self._waited_s + stall_s,
            )
        )

    def _on_failed(self, text: str) -> None:
        self._reporter.warn(f"checkpoint: {text}")


def check_position(start: Start, schedule: Schedule, seed: int, *, may_be_over: bool = False) -> None:
    """A resumed run goes on with the same order of the same samples, and has steps left.

    `may_be_over`: one whose model was not saved may have failed after its last step.
    """
    if not start.facts:
        return
    for name, now in (("batch_size", schedule.batch_size), ("seed", seed), ("length", schedule.length)):
        if (saved := start.facts.get(name)) != now:
            raise CheckpointError(
                f"The checkpoint was trained with {_WORDS[name]} {saved}, but this run has {now}, so step "
                f"{start.step} would mean other samples; use the same, or begin anew with --from."
            )
    if start.step >= schedule.total_steps and not may_be_over:
        raise SpecError(
            f"The checkpoint is of step {start.step}, and the run has {schedule.total_steps} steps, so none is "
            "left; ask for more with --epochs or --max-steps."
        )


def lacks_model(job: Job) -> bool:
    """Whether the run that is resumed, by itself or by its user, has not come to its end before."""
    return bool(job.options.get("failures")) or not job.options.get("resume_has_model", True)
