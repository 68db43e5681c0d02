"""Does a strategy compute what one process computes?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from shoal.launch.runs import target_of
from shoal.spec import Cluster, Data, Job, StrategySpec, parse_strategy
from shoal.spec.checks import require_count
from shoal.verify.bounds import FLOAT64_BOUND, first_step_bound
from shoal.verify.judging import Comparison, compare_trials, movement
from shoal.verify.report import BITWISE, Report, Row, Verdict
from shoal.verify.trials import Facts, Laboratory, Progress, Trial, open_laboratory

if TYPE_CHECKING:
    from shoal.launch.owner import ZygoteProcess

DEFAULT_STEPS = 20
_NUM_TRIALS = 6
"""Where every bit must be equal: inspection, and five runs to compare."""
_DRIFT = "rounding drifts apart over steps in float32; judged are the first step and all steps in float64"
_OTHER_NUMBERS = "random numbers (dropout, augmentation) are drawn for each part of a batch, so other ones here"

_OTHER_FUNCTION = "BatchNorm of a part of the batch is another function than of the whole"


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
        bitwise = self._spec.via == "arena" and not synchronised
        if synchronised:
            self.job = with_overrides(self.job, facts.synchronised_batch(self.job.cluster.workers))
        # Two runs more for the first step; one less where the whole batch is what to compare with in any case.
        self.laboratory.num_trials += 2 * (not bitwise) - synchronised
        reference = _Reference(self.laboratory, facts, synchronised)
        rows = _repeatability(facts)
        if not bitwise:
            rows += self._first_step(reference)
        split = self.laboratory.train(f"{self.job.cluster.workers} workers, {self.job.strategy}", self.job)
        same = reference.train(self.job)
        bound = BITWISE if bitwise else None
        comparison = Comparison(title=reference.title, bound=lambda what: bound, note=_DRIFT * (not bitwise))
        rows += compare_trials(comparison, split, same, facts)
        rows += self._in_double(facts)
        if not synchronised:
            rows += self._against_whole_batch(split, facts)
        return rows + movement(initial, split, same, facts), split.steps

    @property
    def _spec(self) -> Data:
        spec = self.job.spec
        assert isinstance(spec, Data)
        return spec

    def _first_step(self, reference: _Reference) -> list[Row]:
        job = with_overrides(self.job, {"max_steps": 1})
        facts, synchronised = reference.facts, reference.synchronised
        split = self.laboratory.train(f"{job.cluster.workers} workers, first step", job)
        same = reference.train(job)
        title = f"{reference.title}, first step"
        if synchronised and facts.random:
            return compare_trials(Comparison(title=title, note=_OTHER_NUMBERS), split, same, facts)

        def bound(what: str) -> float:
            return first_step_bound(what, facts.optimizer, synchronised=synchronised)

        return compare_trials(Comparison(title=title, bound=bound), split, same, facts)

    def _in_double(self, facts: Facts) -> list[Row]:
        job, workers = replace(self.job, numerics="float64"), self.job.cluster.workers
        if facts.has_batchnorm:
            # Only synchronised layers compute the same function on parts as on the whole.
            strategy = str(replace(self._spec, batchnorm="sync", shares="even"))
            job = with_overrides(replace(job, strategy=strategy, slots=None), facts.synchronised_batch(workers))
        split = self.laboratory.train(f"{workers} workers in float64", job)
        whole = self.laboratory.train("one process in float64, whole batch", alone(job, facts))
        bound = None if facts.random_in_float64 else FLOAT64_BOUND
        comparison = Comparison(
            title="one process in float64, whole batch" + ", BatchNorm synchronised" * facts.has_batchnorm,
            bound=lambda what: bound,
            note=_OTHER_NUMBERS * facts.random_in_float64,
        )
        return compare_trials(comparison, split, whole, facts)

    def _against_whole_batch(self, split: Trial, facts: Facts) -> list[Row]:
        title = "one process in float32, whole batch"
        whole = self.laboratory.train(title, alone(self.job, facts))
        note = _OTHER_FUNCTION if facts.has_batchnorm else _OTHER_NUMBERS * facts.random
        return compare_trials(Comparison(title=title, note=note), split, whole, facts)


@dataclass(frozen=True)
class _Reference:
    """One process that should compute the same in float32: the same slots, or the whole batch where
    synchronised BatchNorm makes slots compute that."""

    laboratory: Laboratory
    facts: Facts
    synchronised: bool

    @property
    def title(self) -> str:
        return (
            "one process, BatchNorm over the whole batch" if self.synchronised else "one process, the same slots"
        )

    def train(self, job: Job) -> Trial:
        slots = None if self.synchronised else job.num_slots
        return self.laboratory.train(self.title, alone(job, self.facts, slots=slots))


def alone(job: Job, facts: Facts, *, slots: int | None = None) -> Job:
    """The same job for one process: the plain loop over whole batches, or the arena with batches in slots."""
    batch = facts.global_batch(job.cluster.workers)
    return replace(
        with_overrides(job, batch),
        strategy="data" if slots is None else "data:via=arena",
        # As many threads as each worker has: the number of threads decides how sums are grouped.
        cluster=Cluster(workers=1, threads=job.cluster.threads_per_worker),
        slots=slots,
    )


def with_overrides(job: Job, overrides: Mapping[str, Any]) -> Job:
    """The same job with more fields of the task changed."""
    return replace(job, overrides={**job.overrides, **overrides})


def _repeatability(facts: Facts) -> list[Row]:
    if facts.repeatable:
        return []
    note = (
        "the same samples and seed gave two different losses in one process: the task draws random numbers "
        "that no seed decides; use torch's own (torch.rand and the like), which are keyed to step and slot"
    )
    return [Row(comparison="the same step twice", what="loss", verdict=Verdict.MISMATCH, note=note)]
