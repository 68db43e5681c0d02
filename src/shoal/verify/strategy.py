"""Does a strategy compute what one process computes?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from shoal.launch.runs import target_of
from shoal.spec import Cluster, Data, Job, StrategySpec, parse_strategy
from shoal.spec.checks import require_count
from shoal.verify.bounds import FLOAT64_BOUND, same_slots_bound
from shoal.verify.judging import Comparison, compare_trials, movement
from shoal.verify.report import Report, Row, Verdict
from shoal.verify.trials import Facts, Laboratory, Progress, Trial, open_laboratory

if TYPE_CHECKING:
    from shoal.launch.owner import ZygoteProcess

DEFAULT_STEPS = 20
_NUM_TRIALS = 6
_OTHER_NUMBERS = "random numbers (dropout, augmentation) are drawn for each part of a batch, so other ones here"


def verify_strategy(
    target: str | Callable[..., Any],
    *,
    workers: int = 2,
    strategy: str | StrategySpec = "data",
    slots: int | None = None,
    steps: int = DEFAULT_STEPS,
    args: Mapping[str, Any] | None = None,
    seed: int | None = None,
    zygote: ZygoteProcess | None = None,
    progress: Progress | None = None,
) -> Report:
    """Train a task for a few steps with a strategy and in one process, and compare all they leave behind.

    `progress(number, total, label)` is called before each of the runs.
    """
    require_count("verify", "steps", steps)
    spec = parse_strategy(strategy)
    assert isinstance(spec, Data)
    job = Job(
        target=target if isinstance(target, str) else target_of(target),
        args=dict(args or {}),
        strategy=str(spec if spec.via != "auto" else replace(spec, via="arena")),
        cluster=Cluster(workers=workers),
        slots=slots,
        overrides={"max_steps": steps, **({} if seed is None else {"seed": seed})},
    )
    with open_laboratory(_NUM_TRIALS, zygote, progress) as laboratory:
        rows, taken = _Verification(laboratory, job).run()
    return Report(
        target=job.target,
        strategy=str(spec),
        workers=workers,
        slots=job.num_slots,
        steps=taken,
        rows=tuple(rows),
    )


@dataclass
class _Verification:
    """The runs that one verification takes, in order, and what is compared with what."""

    laboratory: Laboratory
    job: Job

    def run(self) -> tuple[list[Row], int]:
        """All rows, and how many steps were taken."""
        facts, initial = self.laboratory.inspect(self.job)
        synchronised = self._spec.batchnorm == "sync" and facts.has_batchnorm
        if synchronised:
            self.laboratory.num_trials -= 1  # the whole batch is then what to compare with in any case
        workers = f"{self.job.cluster.workers} workers"
        split = self.laboratory.train(f"{workers}, {self.job.strategy}", self.job)
        whole = self.laboratory.train("one process, whole batch", alone(self.job, facts))
        same = whole if synchronised else self._same_slots(facts)
        rows = [
            *_repeatability(facts),
            *self._against_same_slots(split, same, facts, synchronised),
            *self._in_double(facts),
            *self._against_whole_batch(split, whole, facts, synchronised),
            *movement(initial, split, same, facts),
        ]
        return rows, split.steps

    @property
    def _spec(self) -> Data:
        spec = self.job.spec
        assert isinstance(spec, Data)
        return spec

    def _same_slots(self, facts: Facts) -> Trial:
        job = alone(self.job, facts, slots=self.job.num_slots)
        return self.laboratory.train(f"one process, the same {self.job.num_slots} slots", job)

    def _against_same_slots(self, split: Trial, same: Trial, facts: Facts, synchronised: bool) -> list[Row]:
        bound: float | None = same_slots_bound(self._spec, facts.optimizer, split.steps, whole_batch=synchronised)
        title = f"one process, the same {self.job.num_slots} slots"
        note = ""
        if synchronised:
            title = "one process, BatchNorm over the whole batch"
            bound, note = (None, _OTHER_NUMBERS) if facts.random else (bound, "")
        return compare_trials(Comparison(title=title, bound=bound, note=note), split, same, facts)

    def _in_double(self, facts: Facts) -> list[Row]:
        job = replace(self.job, numerics="float64")
        if facts.has_batchnorm:
            # Only synchronised layers compute the same function on parts as on the whole.
            job = replace(job, strategy=str(replace(self._spec, batchnorm="sync", shares="even")), slots=None)
        split = self.laboratory.train(f"{job.cluster.workers} workers in float64", job)
        whole = self.laboratory.train("one process in float64, whole batch", alone(job, facts))
        comparison = Comparison(
            title="one process in float64, whole batch" + ", BatchNorm synchronised" * facts.has_batchnorm,
            bound=None if facts.random_in_float64 else FLOAT64_BOUND,
            note=_OTHER_NUMBERS if facts.random_in_float64 else "",
        )
        return compare_trials(comparison, split, whole, facts)

    def _against_whole_batch(self, split: Trial, whole: Trial, facts: Facts, synchronised: bool) -> list[Row]:
        if synchronised:
            return []  # already judged
        note = _OTHER_NUMBERS if facts.random else ""
        if facts.has_batchnorm:
            note = "BatchNorm of a part of the batch is another function than of the whole"
        title = "one process in float32, whole batch"
        return compare_trials(Comparison(title=title, bound=None, note=note), split, whole, facts)


def alone(job: Job, facts: Facts, *, slots: int | None = None) -> Job:
    """The same job for one process: the plain loop over whole batches, or the arena with batches in slots."""
    return replace(
        job,
        strategy="data" if slots is None else "data:via=arena",
        # As many threads as each worker has: the number of threads decides how sums are grouped.
        cluster=Cluster(workers=1, threads=job.cluster.threads_per_worker),
        slots=slots,
        overrides={**job.overrides, **facts.global_batch(job.cluster.workers)},
    )


def _repeatability(facts: Facts) -> list[Row]:
    if facts.repeatable:
        return []
    note = (
        "the same samples and seed gave two different losses in one process: the task draws random numbers "
        "that no seed decides; use torch's, numpy's or Python's own generators"
    )
    return [Row(comparison="the same step twice", what="loss", verdict=Verdict.MISMATCH, note=note)]
