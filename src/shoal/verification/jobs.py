"""The jobs that are compared: the same task with one thing changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shoal.ledger.book import CutLog
from shoal.spec import Cluster, Job
from shoal.verification.trials import Facts


def alone(job: Job, facts: Facts, *, slots: int | None = None, cuts: CutLog | None = None) -> Job:
    """The same job for one process: the plain loop over whole batches, or the arena with batches in slots.

    `cuts`: how these were cut, where that was not even.
    """
    plain = "data" if slots is None else "data:via=arena"
    # Where layers take turns, one process must let them do so, too.
    batch = facts.global_batch(job.cluster.places)
    return replace(
        with_overrides(job, batch),
        strategy=job.strategy if job.conduct.has_phases else plain,
        # As many threads as each worker has: the number of threads decides how sums are grouped.
        cluster=Cluster(workers=1, threads=job.cluster.threads_per_worker),
        slots=slots,
        options={"cuts": cuts.plain()} if cuts else {},
    )


def with_overrides(job: Job, overrides: Mapping[str, Any]) -> Job:
    """The same job with more fields of the task changed."""
    return replace(job, overrides={**job.overrides, **overrides})
