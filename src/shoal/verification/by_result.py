"""A strategy beside synchronous training, where no two runs are alike: results, delays and spread over seeds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import mean
from typing import Any

from shoal.errors import LaunchError
from shoal.observe import Event
from shoal.observe.happenings import Decided, StepsTaken
from shoal.spec import Job
from shoal.verification.jobs import with_overrides
from shoal.verification.noise import contests
from shoal.verification.result_report import Pushes, ResultReport, SeedRun
from shoal.verification.trials import Facts, Laboratory

REFERENCE = "data"
_NEVER = 10**9
"""Evaluations between the first step and the last cost time, and could end a run before the other."""
_PARTS = 10
"""The loss is looked at in so many parts of a run: that of one batch says little."""


def num_trials(seeds: int) -> int:
    """How many runs it takes: inspection, and two for each seed."""
    return 1 + 2 * seeds


def compare_results(laboratory: Laboratory, job: Job, facts: Facts, seeds: int) -> ResultReport:
    """Train with so many seeds, each time with the strategy and synchronously, on the same samples."""
    laboratory.num_trials = num_trials(seeds)
    strategy, ours, references = job.strategy, [], []
    for seed in range(facts.seed, facts.seed + seeds):
        seeded = with_overrides(job, {"seed": seed, "evaluate_every": _NEVER})
        ours.append(_train(laboratory, seed, seeded, facts))
        synchronous = replace(seeded, strategy=REFERENCE, slots=max(job.num_slots, job.cluster.places))
        references.append(_train(laboratory, seed, synchronous, facts))
    finished = [pair for pair in zip(ours, references, strict=True) if all(run.results for run in pair)]
    return ResultReport(
        target=job.target,
        strategy=strategy,
        reference=REFERENCE,
        workers=job.cluster.workers,
        precision=job.precision,
        ours=tuple(ours),
        references=tuple(references),
        contests=tuple(contests([one.results for one, _ in finished], [other.results for _, other in finished])),
    )


def _train(laboratory: Laboratory, seed: int, job: Job, facts: Facts) -> SeedRun:
    """One run; one that fails, as by a loss that is no number, is a finding and no error."""
    watched = Watched()
    try:
        found = laboratory.watch(f"seed {seed}: {job.strategy}", job, watched.take)
    except LaunchError as failure:
        run = SeedRun(seed=seed, rollbacks=watched.rollbacks)
        return replace(run, diverged=str(failure)) if watched.was_stopped else replace(run, failed=str(failure))
    results = {f"test {name}" if name == "loss" else name: value for name, value in found["results"].items()}
    results = results or {"train loss": watched.parts[-1] if watched.losses else math.nan}
    usable = {name: value for name, value in results.items() if math.isfinite(value)}
    return SeedRun(
        seed=seed,
        steps=found["steps"],
        samples=found["samples"],
        results=usable,
        rollbacks=watched.rollbacks,
        diverged=watched.divergence(facts.initial_loss, tested=results.get("test loss")),
        pushes=count_pushes(found["audit"]) if "shards" in found.get("audit", {}) else None,
    )


@dataclass
class Watched:
    """What is remembered of a run's events."""

    losses: list[float] = field(default_factory=list)
    rollbacks: int = 0
    was_stopped: bool = False
    """By the coordinator, for no rollback helped."""

    def take(self, event: Event) -> None:
        if isinstance(event.what, StepsTaken):
            self.losses += [loss for _, loss in event.what.steps if loss is not None]
        elif isinstance(event.what, Decided):
            self.rollbacks += event.what.what == "rollback"
            self.was_stopped |= event.what.what == "stop"

    @property
    def parts(self) -> list[float]:
        """The mean training loss of each part of the run."""
        num = min(_PARTS, len(self.losses))
        borders = [len(self.losses) * part // num for part in range(num + 1)] if num else []
        return [mean(self.losses[start:stop]) for start, stop in pairwise(borders)]

    def divergence(self, first: float, *, tested: float | None = None) -> str:
        """How the loss ran away from what it was at first, in a sentence; empty where it did not.

        `tested`: what it was on the test set at the end. Losses are those of the first worker, which may have had
        only a few steps, long before others ran away.
        """
        from shoal.coordinator.policy import has_diverged, is_diverging

        if not self.losses:
            return ""
        last, where = self.parts[-1], ""
        if not is_diverging(last, first=first, best=min(first, *self.parts)):
            if tested is None or last <= first / 2 or not has_diverged(tested, first=first):
                return ""
            last, where = tested, " on the test set"
        return (
            f"The loss ran away: {last:.4g}{where} at the end, {first:.4g} at the start; lower the learning rate."
        )


def count_pushes(audit: Mapping[str, Any]) -> Pushes:
    """A coordinator's audit in a few numbers."""
    shards: Sequence[Mapping[str, Any]] = audit["shards"]
    return Pushes(
        delay_mean=mean(shard["delay_mean"] for shard in shards),
        delay_max=max(shard["delay_max"] for shard in shards),
        applied=sum(shard["applied_pushes"] for shard in shards),
        duplicate=sum(shard["duplicate_pushes"] for shard in shards),
        late=sum(shard["late_pushes"] for shard in shards),
        clean=audit["clean"],
    )
