"""The one process that a strategy is compared with: how it cuts its batches to compute the same function."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shoal.ledger.book import CutLog
from shoal.spec import Job, StepForm
from shoal.verification.jobs import alone, with_overrides
from shoal.verification.report import in_half
from shoal.verification.trials import Facts

_SAME_SLOTS = "the same slots"
_SAME_CUT = "the same slots and micro-batches"


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Two jobs that should leave the same."""

    ours: Job
    reference: Job
    title: str
    """What the reference is."""
    other_numbers: bool
    """Random numbers that no precision turns off are other ones in the two."""


class Reference:
    """Finds the jobs to compare a job with."""

    def __init__(self, job: Job, facts: Facts) -> None:
        self._facts = facts
        self._conduct = job.conduct
        self.synchronised = facts.has_batchnorm and getattr(job.spec, "batchnorm", "local") == "sync"
        """BatchNorm over the whole batch: then that is what one process has to have, and no slots."""
        self.job = with_overrides(job, facts.synchronised_batch(job.num_slots)) if self.synchronised else job
        """The job, with batches that can be compared."""

    @property
    def title(self) -> str:
        """What the reference in the job's own precision is."""
        cut = "BatchNorm over the whole batch" if self.synchronised else self._cut
        return f"one process{in_half(self.job.precision)}, {cut}"

    @property
    def cuts_width(self) -> bool:
        """Whether several processes compute one layer."""
        return self._conduct.width is not None

    @property
    def draws_otherwise(self) -> bool:
        """Whether the model draws other random numbers than one process: where several compute one pass."""
        return self._conduct.draws_otherwise

    def same(self, job: Job, cuts: CutLog | None = None) -> Job:
        """One process that should compute the same in the job's precision: the same cut, or the whole batch where
        synchronised BatchNorm makes slots compute that."""
        return alone(job, self._facts, cuts=cuts) if self.synchronised else self._same_cut(job, cuts)

    def in_double(self) -> Pair:
        """All in float64, against the whole batch where parts of it compute the same function. Where the task has
        fewer digits than that, rounding drifts apart: one step alone."""
        facts, job = self._facts, replace(self.job, numerics="float64", precision="fp32")
        title, has_whole = "one process in float64, whole batch", True
        if facts.narrows:
            job = with_overrides(job, {"max_steps": 1})
        if facts.has_batchnorm:
            # Only synchronised layers compute the same function on parts as on the whole, and only in plain steps.
            has_whole = self._conduct.synchronises and job.form == StepForm()
            if has_whole:
                job = self._synchronised(job)
                title += ", BatchNorm synchronised" * (job.num_slots > 1)
            else:
                title = f"one process in float64, {self._cut}"
        return Pair(
            ours=job,
            reference=alone(job, facts) if has_whole else self._same_cut(job),
            title=title + ", first step" * facts.narrows,
            other_numbers=facts.random_in_float64 and (has_whole or self.draws_otherwise),
        )

    @property
    def _cut(self) -> str:
        return _SAME_CUT if self._conduct.microbatches > 1 else _SAME_SLOTS

    def _same_cut(self, job: Job, cuts: CutLog | None = None) -> Job:
        job = alone(job, self._facts, slots=job.num_slots, cuts=cuts)
        if self._conduct.microbatches == 1:
            return job
        # What follows each other through a pipeline are one process's micro-batches.
        return with_overrides(job, {"accumulate": self._facts.accumulate * self._conduct.microbatches})

    def _synchronised(self, job: Job) -> Job:
        job = replace(job, strategy=str(job.spec.synchronised()), slots=None)
        return with_overrides(job, self._facts.synchronised_batch(job.num_slots))
