"""`RunSummary`: where a run stands, folded from its events. Terminal, log and report all read this."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from shoal.observe.events import Event
from shoal.observe.worker_scales import WorkerScales

UNDOING = ("restarted", "resumed")
"""Kinds of events after which all that was told of steps past theirs is void."""
_OF_PRECISION = ("precision", "loss_scale", "skipped_steps", "float32_layers")


@dataclass
class Worker:
    """One worker, as last heard of."""

    state: str = "starting"
    """As in its `state` events, or `lost`, or `replaced` until the successor speaks."""
    rss: int = 0
    """Bytes of memory now."""
    peak_rss: int = 0
    """The most that it has held; told exactly at its end, before that by its beats."""
    peak_is_exact: bool = False
    peak_gpu: int = 0
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
        if time > start:
            self.steps_per_s = (step - first_step) / (time - start)
            self.samples_per_s = (samples - first_samples) / (time - start)

    def pause(self) -> None:
        """Training stands still for an evaluation, say: the time until it goes on is not counted."""
        self._marks.clear()


class RunSummary:
    """Where a run stands after all events so far."""

    def __init__(self) -> None:
        self.world: dict[str, Any] = {}
        self.workers: dict[int, Worker] = {}
        self.spares = 0
        self.replaced: Counter[str] = Counter()
        """How many processes of each role have been replaced."""
        self.restarts = 0
        """How often all processes began again from a checkpoint, or from the start."""
        self.undone_steps = 0
        """Steps that were taken in vain because of that."""
        self.faults: Counter[str] = Counter()
        """How many faults of each kind were injected."""
        self.state = "starting"
        self.step = 0
        self.total_steps = 0
        self.epoch = 0
        self.samples = 0
        self.loss: float | None = None
        self.speed = Speed()
        self.evaluations: list[tuple[int, dict[str, float]]] = []
        self.saved: dict[str, Any] = {}
        self.stalls: list[float] = []
        """Of each checkpoint: the seconds that training stood still for it."""
        self._skipped: list[tuple[int, int, float]] = []
        """The last step of some, how many of their parts were learnt already, and what these count."""
        self.skipped_seen = 0
        """Samples that were left out because an earlier run had them."""
        self.audit: dict[str, Any] = {}
        """What became of the data, once that was counted."""
        self.precision: dict[str, Any] = {}
        """What the model computed in, and what came of it, where that was not float32 alone."""
        self._scales = WorkerScales()
        self.outcome: Event | None = None
        """The `finished` or `stopped` event that ended the run."""

    def add(self, event: Event) -> None:
        """Take one event into account; kinds it does not know change nothing."""
        update = getattr(self, f"_on_{event.kind}", None)
        if update is not None:
            update(event)

    @property
    def seconds_left(self) -> float | None:
        """Training time to the last step at the present speed; None where that is not known."""
        if not self.speed.steps_per_s or not self.total_steps:
            return None
        return max(0, self.total_steps - self.step) / self.speed.steps_per_s

    @property
    def results(self) -> dict[str, float]:
        """The final results, or those of the last evaluation."""
        if self.outcome is not None and self.outcome.values.get("results"):
            return dict(self.outcome.values["results"])
        return self.evaluations[-1][1] if self.evaluations else {}

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

    def _on_world(self, event: Event) -> None:
        self.world = event.values
        self.spares = event.values.get("spares", 0)
        for rank in range(event.values.get("workers", 0)):
            self.worker(rank)

    def _on_audit(self, event: Event) -> None:
        self.audit = event.values

    def _on_state(self, event: Event) -> None:
        state = event.values["state"]
        if self._is_worker(event.rank):
            self.worker(event.rank or 0).state = state
        if not event.rank:
            self.state = state
            if state != "training":
                self.speed.pause()

    def _on_beat(self, event: Event) -> None:
        # The last beats of one that has left say nothing about those that are there.
        if self._is_worker(event.rank) and (event.rank in self.workers or not self.world):
            worker = self.worker(event.rank or 0)
            worker.rss = event.values.get("rss", 0)
            worker.note_peak(worker.rss)

    def _on_memory(self, event: Event) -> None:
        for rank, peak_rss in event.values["peak_rss"]:
            if self._is_worker(rank):
                self.worker(rank).note_peak(peak_rss)

    def _on_steps(self, event: Event) -> None:
        values = event.values
        if values["steps"]:
            self.step, self.loss = values["steps"][-1]
        self.samples = values["samples"]
        if "skipped" in values:
            self._skipped.append((self.step, *values["skipped"]))
        self.total_steps = values.get("total_steps") or self.total_steps
        self.epoch = values.get("epoch", self.epoch)
        self.speed.mark(event.time, self.step, self.samples)

    def _on_progress(self, event: Event) -> None:
        # Workers tell of their own batches, and one may be ahead of another.
        self.step = max(self.step, event.values["step"])
        self.samples = max(self.samples, event.values["samples"])
        self.total_steps = event.values["total_steps"]
        self.speed.mark(event.time, self.step, self.samples)

    def _on_evaluation(self, event: Event) -> None:
        self.evaluations.append((event.values["step"], event.values["results"]))

    def _on_fault(self, event: Event) -> None:
        self.faults[event.values["kind"]] += 1

    def _on_lost(self, event: Event) -> None:
        if event.values.get("role", "worker") == "worker":
            self.worker(event.values["rank"]).state = "lost"

    def _on_replaced(self, event: Event) -> None:
        role = event.values.get("role", "worker")
        self.replaced[role] += 1
        if role == "worker":
            worker = self.worker(event.values["rank"])
            worker.state = "replaced"
            worker.replacements += 1
            self.spares = max(0, self.spares - ("spare" in event.values))
            if "by" in event.values:
                self._keep(event.values["hosts"])

    def _on_restarted(self, event: Event) -> None:
        self._on_resumed(event)
        self.samples = event.values["samples"]
        self.restarts += 1
        self.undone_steps += event.values["undone"]
        self.state = "starting"
        for worker in self.workers.values():
            worker.state = "starting"

    def _on_resumed(self, event: Event) -> None:
        """What came after this step is void."""
        self.step, self.loss = event.values["step"], None
        self.evaluations = [found for found in self.evaluations if found[0] <= self.step]
        self._skipped = [entry for entry in self._skipped if entry[0] <= self.step]
        self.saved, self.audit, self.precision, self._scales = {}, {}, {}, WorkerScales()
        self.outcome = None
        self.speed.pause()

    def _on_scaled(self, event: Event) -> None:
        self._keep(event.values["hosts"])

    def _keep(self, hosts: list[list[int]]) -> None:
        """These workers are there, each under the lowest of its places, and no others."""
        ranks = {places[0] for places in hosts if places}
        self.workers = {rank: self.worker(rank) for rank in sorted(ranks)}

    def _on_checkpoint(self, event: Event) -> None:
        self.stalls.append(event.values["stall"])

    def _on_done(self, event: Event) -> None:
        results, memory = event.values["results"], event.values.get("memory", {})
        self.skipped_seen = results.get("skipped_seen", self.skipped_seen)
        if self._is_worker(event.rank):
            worker = self.worker(event.rank or 0)
            if "host" in memory:
                worker.peak_rss, worker.peak_is_exact = memory["host"], True
            worker.peak_gpu = max(worker.peak_gpu, memory.get("gpu", 0))
        self.precision |= {name: results[name] for name in _OF_PRECISION if name in results}
        self.precision |= self._scales.note(event.rank or 0, results)

    def _on_saved(self, event: Event) -> None:
        self.saved = event.values

    def _on_finished(self, event: Event) -> None:
        self.outcome = event
        self.state = "done"

    def _on_stopped(self, event: Event) -> None:
        self.outcome = event
        self.state = "stopped"

    def _is_worker(self, rank: int | None) -> bool:
        """Spares speak too, under ranks past the workers'; they have no place of their own yet.

        Where there are servers there are no spares, and workers may be added.
        """
        can_grow = not self.world or "servers" in self.world
        return rank is not None and (can_grow or rank < self.world.get("places", self.world.get("workers", 0)))
