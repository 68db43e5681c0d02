"""`RunSummary`: where a run stands, folded from its events. Terminal, log and report all read this."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from shoal.observe.events import Event
from shoal.observe.happenings import (
    Audited,
    CheckpointWritten,
    Done,
    Evaluated,
    FaultInjected,
    Finished,
    Heartbeat,
    Lost,
    MemoryPeaks,
    ProgressMade,
    Replaced,
    Restarted,
    Resumed,
    Saved,
    Scaled,
    StateEntered,
    StepsTaken,
    Stopped,
    WorldFormed,
)
from shoal.observe.results import RunResults
from shoal.spec.vocabulary import Role, State

UNDOING = (Restarted, Resumed)
"""Events after which all that was told of steps past theirs is void."""
_LEAST_WINDOW_S = 0.005
"""Of a speed: in less, nothing is measured."""
_OF_PRECISION = ("precision", "loss_scale", "skipped_steps", "float32_layers")


@dataclass
class Worker:
    """One worker, as last heard of."""

    state: State = State.STARTING
    rss: int = 0
    """Bytes of memory now."""
    peak_rss: int = 0
    """The most that it has held; told exactly at its end, before that by its beats."""
    peak_is_exact: bool = False
    peak_gpu: int = 0
    peak_gpu_taken: int = 0
    """What its process took from the driver for that, used or not."""
    replacements: int = 0
    """How often another process has taken this rank."""

    def note_peak(self, rss: int) -> None:
        """A beat told of this much. The kernel counts pages in batches, so a beat may exceed the true peak."""
        if not self.peak_is_exact:
            self.peak_rss = max(self.peak_rss, rss)


@dataclass
class Speed:
    """Samples and steps per second over the last few seconds of training."""

    window_s: float = 10.0
    samples_per_s: float | None = None
    steps_per_s: float | None = None
    _marks: deque[tuple[float, int, int]] = field(default_factory=deque)

    def mark(self, time: float, step: int, samples: int) -> None:
        """By `time`, so many steps and samples were done."""
        self._marks.append((time, step, samples))
        while len(self._marks) > 2 and self._marks[1][0] < time - self.window_s:
            self._marks.popleft()
        start, first_step, first_samples = self._marks[0]
        if time - start >= _LEAST_WINDOW_S:  # what had waited for whoever hears it comes at once
            self.steps_per_s = (step - first_step) / (time - start)
            self.samples_per_s = (samples - first_samples) / (time - start)

    def pause(self) -> None:
        """Training stands still for an evaluation, say: the time until it goes on is not counted."""
        self._marks.clear()


class RunSummary:
    """Where a run stands after all events so far."""

    def __init__(self) -> None:
        self.world: WorldFormed | None = None
        self.workers: dict[int, Worker] = {}
        self.spares = 0
        self.replaced: Counter[Role] = Counter()
        """How many processes of each role have been replaced."""
        self.undone_steps = 0
        """Steps that were taken in vain because of that."""
        self.faults: Counter[str] = Counter()
        """How many faults of each kind were injected."""
        self.state = State.STARTING
        self.step = 0
        self.total_steps = 0
        self.epoch = 0
        self.samples = 0
        self.loss: float | None = None
        self.speed = Speed()
        self.evaluations: list[tuple[int, dict[str, float]]] = []
        self.by_client: dict[str, list[Any]] = {}
        """Of the last evaluation, where clients hold samples back, in columns."""
        self.saved: Saved | None = None
        self.stalls: list[float] = []
        """Of each checkpoint: the seconds that training stood still for it."""
        self._skipped: list[tuple[int, int, float]] = []
        """The last step of some, how many of their parts were learnt already, and what these count."""
        self.audit: Audited | None = None
        """What became of the data, once that was counted."""
        self.ends = RunResults()
        """What the processes that are done came to."""
        self.outcome: Finished | Stopped | None = None
        """How the run ended."""

    def add(self, event: Event) -> None:
        """Take one event into account; kinds it does not know change nothing."""
        update = getattr(self, f"_on_{event.kind}", None)
        if update is not None:
            update(event.what, event)

    @property
    def seconds_left(self) -> float | None:
        """Training time to the last step at the present speed; None where that is not known."""
        if not self.speed.steps_per_s or not self.total_steps:
            return None
        return max(0, self.total_steps - self.step) / self.speed.steps_per_s

    @property
    def results(self) -> dict[str, float]:
        """The final results of the model, or those of the last evaluation."""
        if self.outcome is not None and self.outcome.results:
            return self.outcome.results
        return self.evaluations[-1][1] if self.evaluations else {}

    @property
    def evaluated_before_its_end(self) -> int | None:
        """After which step the results were had, where the run stopped at a later one."""
        if not self.evaluations or self.evaluations[-1][1] != self.results:
            return None
        step = self.evaluations[-1][0]
        return step if step < self.step < self.total_steps else None

    @property
    def restarts(self) -> int:
        """How often all processes began again from a checkpoint, or from the start."""
        return self.ends.restarts

    @property
    def skipped_seen(self) -> int:
        """Samples that were left out because an earlier run had them."""
        return self.ends.values.get("skipped_seen", 0)

    @property
    def precision(self) -> dict[str, Any]:
        """What the model computed in, and what came of it; nothing where that was float32 alone."""
        told = self.ends.values
        return {name: told[name] for name in _OF_PRECISION if name in told} if "precision" in told else {}

    @property
    def skipped_parts(self) -> int:
        """Parts of batches that were learnt already."""
        return sum(parts for _, parts, _ in self._skipped)

    @property
    def skipped_weight(self) -> float:
        """What these count, in samples where the task does not weigh them."""
        return sum(weight for _, _, weight in self._skipped)

    def worker(self, rank: int) -> Worker:
        """The worker of this rank."""
        return self.workers.setdefault(rank, Worker())

    def _on_world(self, told: WorldFormed, event: Event) -> None:
        self.world = told
        self.spares = told.spares
        for rank in range(told.workers):
            self.worker(rank)

    def _on_audit(self, told: Audited, event: Event) -> None:
        self.audit = told

    def _on_state(self, told: StateEntered, event: Event) -> None:
        if self._is_worker(event.rank):
            self.worker(event.rank or 0).state = told.state
        if not event.rank:
            before, self.state = self.state, told.state
            if told.state != State.TRAINING:
                self.speed.pause()
            elif before == State.EVALUATING:
                # What is done from here on took this long: steps may be told in bursts, milliseconds apart.
                self.speed.mark(event.time, self.step, self.samples)

    def _on_beat(self, told: Heartbeat, event: Event) -> None:
        # The last beats of one that has left say nothing about those that are there.
        if self._is_worker(event.rank) and (event.rank in self.workers or self.world is None):
            worker = self.worker(event.rank or 0)
            worker.rss = told.rss
            worker.note_peak(worker.rss)

    def _on_memory(self, told: MemoryPeaks, event: Event) -> None:
        for rank, peak_rss in told.peak_rss:
            if self._is_worker(rank):
                self.worker(rank).note_peak(peak_rss)

    def _on_steps(self, told: StepsTaken, event: Event) -> None:
        if told.steps:
            self.step, self.loss = told.steps[-1]
        self.samples = told.samples
        if told.skipped is not None:
            parts, weight = told.skipped
            self._skipped.append((self.step, parts, weight))
        self.total_steps = told.total_steps or self.total_steps
        self.epoch = self.epoch if told.epoch is None else told.epoch
        self.speed.mark(event.time, self.step, self.samples)

    def _on_progress(self, told: ProgressMade, event: Event) -> None:
        # Workers tell of their own batches, and one may be ahead of another.
        self.step = max(self.step, told.step)
        self.samples = max(self.samples, told.samples)
        self.total_steps = told.total_steps
        self.speed.mark(event.time, self.step, self.samples)

    def _on_evaluation(self, told: Evaluated, event: Event) -> None:
        self.evaluations.append((told.step, told.results))
        self.by_client = told.by_client or {}

    def _on_fault(self, told: FaultInjected, event: Event) -> None:
        self.faults[told.kind] += 1

    def _on_lost(self, told: Lost, event: Event) -> None:
        if (told.role or Role.WORKER) == Role.WORKER:
            self.worker(told.rank).state = State.LOST

    def _on_replaced(self, told: Replaced, event: Event) -> None:
        role = told.role or Role.WORKER
        self.replaced[role] += 1
        if role == Role.WORKER:
            worker = self.worker(told.rank)
            worker.state = State.REPLACED
            worker.replacements += 1
            self.spares = max(0, self.spares - (told.spare is not None))
            if told.by is not None and told.hosts is not None:
                self._keep(told.hosts)

    def _on_restarted(self, told: Restarted, event: Event) -> None:
        self._undo(told.step)
        self.samples = told.samples
        self.ends.begin_again()
        self.undone_steps += told.undone
        self.state = State.STARTING
        for worker in self.workers.values():
            worker.state = State.STARTING

    def _on_resumed(self, told: Resumed, event: Event) -> None:
        self._undo(told.step)

    def _undo(self, step: int) -> None:
        """What came after this step is void."""
        self.step, self.loss = step, None
        self.evaluations = [found for found in self.evaluations if found[0] <= step]
        self._skipped = [entry for entry in self._skipped if entry[0] <= step]
        self.saved = self.audit = self.outcome = None
        self.ends.forget()
        self.speed.pause()

    def _on_scaled(self, told: Scaled, event: Event) -> None:
        self._keep(told.hosts)

    def _keep(self, hosts: list[list[int]]) -> None:
        """These workers are there, each under the lowest of its places, and no others."""
        ranks = {places[0] for places in hosts if places}
        self.workers = {rank: self.worker(rank) for rank in sorted(ranks)}

    def _on_checkpoint(self, told: CheckpointWritten, event: Event) -> None:
        self.stalls.append(told.stall)

    def _on_done(self, told: Done, event: Event) -> None:
        self.ends.note(event.rank or 0, told)
        memory = told.memory or {}
        if self._is_worker(event.rank):
            worker = self.worker(event.rank or 0)
            if "host" in memory:
                worker.peak_rss, worker.peak_is_exact = memory["host"], True
            worker.peak_gpu = max(worker.peak_gpu, memory.get("gpu", 0))
            worker.peak_gpu_taken = max(worker.peak_gpu_taken, memory.get("gpu_taken", 0))

    def _on_saved(self, told: Saved, event: Event) -> None:
        self.saved = told

    def _on_finished(self, told: Finished, event: Event) -> None:
        self.outcome, self.state = told, State.DONE

    def _on_stopped(self, told: Stopped, event: Event) -> None:
        self.outcome, self.state = told, State.STOPPED

    def _is_worker(self, rank: int | None) -> bool:
        """Spares speak too, under ranks past the workers'; they have no place of their own yet.

        Where there are servers there are no spares, and workers may be added.
        """
        if rank is None or self.world is None or self.world.servers is not None:
            return rank is not None
        return rank < (self.world.places or self.world.workers)
