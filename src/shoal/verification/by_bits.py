"""A strategy beside one process: every parameter, buffer and number of the optimizer's state."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from shoal.ledger.book import CutLog
from shoal.observe.wording import plural
from shoal.spec import Claim, Job
from shoal.spec.conduct import StateHolder
from shoal.verification.bounds import FLOAT64_BOUND, first_step_bound
from shoal.verification.jobs import alone, with_overrides
from shoal.verification.judging import STATE, Comparison, compare_trials, movement, use_of_half
from shoal.verification.reference import Reference
from shoal.verification.report import BITWISE, Row, Verdict, VerifyReport, numbers_of
from shoal.verification.trials import Facts, Laboratory, Trial

if TYPE_CHECKING:
    from shoal.verification.difference import Tensors

NUM_TRIALS = 6
"""Where every bit must be equal: inspection, and five runs to compare."""
_DRIFT = "rounding drifts apart over steps in {}; judged are the first step and all steps in float64"
_OTHER_NUMBERS = "random numbers (dropout, augmentation) are drawn for each part of a batch, so other ones here"
_DRAWN_BY_SEVERAL = (
    "several processes compute one pass, each with random numbers (dropout) of its own; judged is float64, without"
)
_SKIPPED = "the first step was skipped, for a gradient is no number in half precision; judged is float64"
_NARROWS = "parts of the task are computed in float32 whatever numbers its model has, so it is judged as that is"
_NO_FLOAT64 = (
    "the task cannot be computed in float64 ({}), so parts of a batch were not compared with the whole; let what "
    "it brings along follow its model's numbers, as in weights.to(output.dtype)"
)
_OTHER_FUNCTION = "BatchNorm of a part of the batch is another function than of the whole"
_OWN_STATES = "each worker has an optimizer of its own, and there is none of all to compare"


def compare_bits(laboratory: Laboratory, job: Job, facts: Facts, initial: Tensors, claim: Claim) -> VerifyReport:
    """Train a few steps with the strategy and in one process, and compare all they leave behind."""
    rows, steps = _Verification(laboratory, job, facts, claim).run(initial)
    return VerifyReport(
        target=job.target,
        strategy=job.strategy,
        workers=job.cluster.workers,
        slots=job.num_slots,
        steps=steps,
        rows=tuple(rows),
        precision=job.precision,
    )


class _Verification:
    """The runs that one verification takes, in order, and what is compared with what."""

    def __init__(self, laboratory: Laboratory, job: Job, facts: Facts, claim: Claim) -> None:
        self.laboratory = laboratory
        self.facts = facts
        self.reference = Reference(job, facts)
        self.job = self.reference.job
        self.bitwise = claim is Claim.BITS and not self.reference.synchronised
        self._numbers = numbers_of(job.precision)
        self._own_states = job.conduct.state is StateHolder.EACH_WORKER

    def run(self, initial: Tensors) -> tuple[list[Row], int]:
        """All rows, and how many steps were taken."""
        synchronised = self.reference.synchronised
        is_half = self.job.precision != "fp32"
        # Two runs more for the first step, one for half precision; one less where the whole batch is what to
        # compare with in any case.
        self.laboratory.num_trials += 2 * (not self.bitwise) + is_half - synchronised
        self.laboratory.num_trials -= 2 * bool(self.facts.why_no_float64)
        rows = [*_repeatability(self.facts), *self._meaning()]
        if not self.bitwise:
            rows += self._first_step()
        split = self.laboratory.train(f"{_workers(self.job)}, {self.job.strategy}", self.job)
        same = self._alone(self.job, split.cuts)
        comparison = Comparison(
            title=self.reference.title,
            bound=lambda what: BITWISE if self.bitwise else None,
            note=_DRIFT.format(self._numbers) * (not self.bitwise),
        )
        rows += self._compare(comparison, split, same)
        rows += self._in_double()
        if not synchronised:
            rows += self._against_whole_batch(split)
        if is_half:
            rows += self._beside_float32(split)
        rows += movement(initial, split, same, self.facts)
        if self._own_states:
            rows.append(
                Row(comparison="kept by each worker", what=STATE, verdict=Verdict.NOT_JUDGED, note=_OWN_STATES)
            )
        return rows, split.steps

    def _meaning(self) -> list[Row]:
        """Why parts of a batch train otherwise than the whole, whatever the strategy."""
        parts = self.job.num_slots * self.facts.accumulate * self.job.conduct.microbatches
        if parts == 1 or not self.facts.why_no_mean:
            return []
        note = self.facts.why_no_mean
        return [Row(comparison="a batch and its halves", what="loss", verdict=Verdict.WARNING, note=note)]

    def _alone(self, job: Job, cuts: CutLog | None = None) -> Trial:
        return self.laboratory.train(self.reference.title, self.reference.same(job, cuts))

    def _compare(self, comparison: Comparison, ours: Trial, reference: Trial) -> list[Row]:
        rows = compare_trials(comparison, ours, reference, self.facts)
        return [row for row in rows if row.what != STATE] if self._own_states else rows

    def _first_step(self) -> list[Row]:
        job = with_overrides(self.job, {"max_steps": 1})
        facts, reference = self.facts, self.reference
        split = self.laboratory.train(f"{_workers(job)}, first step", job)
        same = self._alone(job)
        title = f"{reference.title}, first step"
        if split.skipped:
            return self._compare(Comparison(title=title, note=_SKIPPED), split, same)
        if facts.random and (reference.synchronised or reference.draws_otherwise):
            note = _OTHER_NUMBERS if reference.synchronised else _DRAWN_BY_SEVERAL
            return self._compare(Comparison(title=title, note=note), split, same)

        narrowed = reference.cuts_width and job.precision != "fp32"

        def bound(what: str) -> float:
            return first_step_bound(what, facts.optimizer, synchronised=reference.synchronised, narrowed=narrowed)

        return self._compare(Comparison(title=title, bound=bound), split, same)

    def _in_double(self) -> list[Row]:
        facts, pair = self.facts, self.reference.in_double()
        if facts.why_no_float64:
            note = _NO_FLOAT64.format(facts.why_no_float64)
            return [Row(comparison=pair.title, what="loss", verdict=Verdict.WARNING, note=note)]
        ours = self.laboratory.train(f"{_workers(pair.ours)} in float64", pair.ours)
        reference = self.laboratory.train(pair.title, pair.reference)

        def bound(what: str) -> float | None:
            if pair.other_numbers:
                return None
            if not facts.narrows:
                return FLOAT64_BOUND
            return first_step_bound(what, facts.optimizer, synchronised=facts.has_batchnorm)

        note = _OTHER_NUMBERS * pair.other_numbers or _NARROWS * facts.narrows
        return self._compare(Comparison(title=pair.title, bound=bound, note=note), ours, reference)

    def _against_whole_batch(self, split: Trial) -> list[Row]:
        title = f"one process in {self._numbers}, whole batch"
        whole = self.laboratory.train(title, alone(self.job, self.facts))
        note = _OTHER_FUNCTION if self.facts.has_batchnorm else _OTHER_NUMBERS * self.facts.random
        return self._compare(Comparison(title=title, note=note), split, whole)

    def _beside_float32(self, split: Trial) -> list[Row]:
        """How far half precision leads from float32; that it leads anywhere shows that it was used."""
        title = "the same workers in float32"
        plain = self.laboratory.train(title, replace(self.job, precision="fp32"))
        return use_of_half(self._compare(Comparison(title=title), split, plain), self._numbers)


def _workers(job: Job) -> str:
    return plural(job.cluster.workers, "worker")


def _repeatability(facts: Facts) -> list[Row]:
    if facts.repeatable:
        return []
    note = (
        "the same samples and seed gave two different losses in one process: the task draws random numbers "
        "that no seed decides; use torch's own (torch.rand and the like), which are keyed to step and slot"
    )
    return [Row(comparison="the same step twice", what="loss", verdict=Verdict.MISMATCH, note=note)]
