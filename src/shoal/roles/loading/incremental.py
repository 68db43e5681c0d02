"""Training on from an earlier model: what it has seen, and a task that leaves that out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from shoal.datasets import Shipped
from shoal.datasets.stream import ForwardOnly
from shoal.errors import SpecError
from shoal.ledger import Order, Schedule
from shoal.ledger.seen import DataPass, seen_by, unseen
from shoal.spec import Job, Task


class History:
    """The runs that a job's model comes from, and this job's place behind them."""

    def __init__(self, job: Job) -> None:
        self.passes = tuple(DataPass.from_dict(values) for values in job.options.get("seen", ()))
        self.skips_seen = bool(job.options.get("skip_seen"))
        self._has_fold = "fold" in job.overrides

    @cached_property
    def num_skipped(self) -> int:
        """Samples that this job leaves out."""
        return int(seen_by(self.passes).sum()) if self.skips_seen else 0

    def after(self, step: int, task: Task, schedule: Schedule) -> list[dict[str, Any]]:
        """All passes, this job's included, once this step is committed: as plain data."""
        own = DataPass(
            length=schedule.length + self.num_skipped,
            samples=schedule.samples_after(step),
            seed=task.seed,
            shuffle=task.shuffle,
            skips_seen=self.skips_seen,
            is_plain=isinstance(schedule.order, Order) and not self._has_fold and not task.drop_last,
        )
        return [each.to_dict() for each in (*self.passes, own)]


def without_seen(task: Task, passes: Sequence[DataPass]) -> Task:
    """The task that trains on those of its samples that no pass has seen."""
    if task.sampler is not None:
        raise SpecError(
            "--skip-seen chooses which samples are trained on, and so does the task's sampler; leave one of them "
            "out."
        )

    def view() -> Any:
        from torch.utils.data import Subset

        train = task.dataset("train")
        if isinstance(train, ForwardOnly):
            raise SpecError(
                "--skip-seen takes samples from anywhere, but the train set is read forward only; give it what is "
                "new alone, and leave --skip-seen out."
            )
        return Subset(train, unseen(passes, len(train)).tolist())

    return replace(task, train=Shipped(view) if isinstance(task.train, Shipped) else view)
